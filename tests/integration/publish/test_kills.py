"""Publishing, revoking, pulling and removing, each killed at a random moment and run again: nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.locks import MAIN
from helpers.publish_world import PublishWorld
from integration.publish.conftest import opened
from integration.publish.test_collect import is_whole

from envbuild.oci.push import digest_of_tag
from envbuild.publish.index import read_index
from envbuild.publish.models import Publication

STEPS = ("publish", "publish", "pull", "revoke", "gc")


@dataclass
class KilledCommands:
    """Commands on one repository, each begun once more after it was killed."""

    world: PublishWorld
    place: str
    random: random.Random
    images: dict[str, bytes] = field(default_factory=dict)
    killed: dict[str, int] = field(default_factory=dict)
    _usual: dict[str, float] = field(default_factory=dict)

    def step(self, name: str, number: int) -> None:
        listed = [publication for publication in self.index if publication.revoked is None]
        if name == "publish" or len(listed) < 2:
            self.publish(number)
        elif name == "pull":
            self.pull(self.random.choice(listed))
        elif name == "revoke":
            self.revoke(self.random.choice(listed))
        else:
            self.collect(listed)

    def publish(self, number: int) -> None:
        self.world.rebuild({"megatron-core": b"megatron %d" % number}, MAIN.replace("0.30", f"0.30.{number}"))
        self.world.certify()
        self.run("publish", "--to", self.place, "--stack", "mcore", "--target", "cpu", "--base", "debian12", *self.keys)
        newest = self.index[-1]
        assert newest.oci_digest == self.world.image.record.oci_digest
        assert self.is_whole(newest)
        self.images[newest.tag] = self.world.image.sqsh().read_bytes()

    def pull(self, publication: Publication) -> None:
        out = self.world.project / "pulled.sqsh"
        out.unlink(missing_ok=True)
        self.run("pull", f"{self.place}:{publication.tag}", "--output", str(out), *self.keys[:2])
        assert out.read_bytes() == self.images[publication.tag]

    def revoke(self, publication: Publication) -> None:
        words = ["--revoke", publication.oci_digest, "--reason", "wrong losses"]
        self.run("publish", "--to", self.place, *words)
        assert [entry.revoked is not None for entry in self.index if entry.tag == publication.tag] == [True]

    def collect(self, listed: list[Publication]) -> None:
        """The newest and the one of the current lock stay; what is listed afterwards is whole."""
        self.run("gc", "--from", self.place)
        left = {publication.tag for publication in self.index}
        assert listed[-1].tag in left
        assert all(map(self.is_whole, self.index))

    def run(self, *words: str) -> None:
        command, env = words[0], {**os.environ, "ENVBUILD_CACHE_DIR": str(self.world.project / "cache")}
        env["ENVBUILD_STATE_DIR"] = str(self.world.project / "state")
        # As long as the last one took that found all there: most are killed at work, each moment has its turn.
        wait = self.random.uniform(0.2, self._usual.get(command, 1.0))
        kill = self.random.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
        silent = subprocess.DEVNULL
        arguments = [sys.executable, "-m", "envbuild", *words]
        with subprocess.Popen(arguments, cwd=self.world.project, env=env, stdout=silent, stderr=silent) as process:
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                process.send_signal(kill)
                process.wait()
                name = f"{command} {kill.name}"
                self.killed[name] = self.killed.get(name, 0) + 1
        begun = time.monotonic()
        again = subprocess.run(arguments, cwd=self.world.project, env=env, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
        self._usual[command] = time.monotonic() - begun

    def is_whole(self, publication: Publication) -> bool:
        return is_whole(opened(*self.place.split("/", 1)), publication)

    @property
    def index(self) -> list[Publication]:
        return list(read_index(opened(*self.place.split("/", 1))))

    @property
    def keys(self) -> list[str]:
        return ["--trust", str(self.world.project / "trust.toml"), "--key", str(self.world.key)]

    def moving_tags_are_right(self) -> bool:
        """A moving tag names the newest publication that was not revoked, and nothing where there is none."""
        newest = {publication.moving_tag: publication for publication in self.index if publication.revoked is None}
        registry = opened(*self.place.split("/", 1))
        return all(digest_of_tag(registry, tag) == publication.oci_digest for tag, publication in newest.items())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(10, id="10"), pytest.param(200, id="200", marks=pytest.mark.soak)])
def test_nothing_is_lost(
    open_registry: str, account: None, repository: str, world: PublishWorld, kills: int, tmp_path: Path
) -> None:
    seed = int(os.environ.get("ENVBUILD_SEED", time.time()))
    place = f"{open_registry.removeprefix('http://')}/{repository}"
    commands = KilledCommands(world, place, random.Random(seed))
    print(f"ENVBUILD_SEED={seed}")
    for number in itertools.count():
        if sum(commands.killed.values()) >= kills:
            break
        commands.step(commands.random.choice(STEPS), number)
        assert commands.moving_tags_are_right()
    print("killed:", dict(sorted(commands.killed.items())))
