"""Nights of stack mcore on target cpu: a registry with TLS and a password, an object store, a shared ledger."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from conftest import Tool, shared_folder
from helpers.fault_proxy import fault_proxy
from helpers.night_place import Place, night_place
from helpers.stores import PASSWORD, docker_registry, registry_program

from envbuild.catalog.catalog import Selection
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import CaseRow, CertificateRow, NightRow, PublicationRow, StepRow
from envbuild.publish.index import read_index
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry

NIGHT = ("nightly", "--stack", "mcore", "--targets", "cpu", "--base", "debian12")
CASES = 15
CHAIN = ("lock", "wheels", "image", "certify", "publish")
# In which steps nights are killed, and up to how many seconds after a step began.
AIMS = {"lock": 3.0, "image": 12.0, "certify": 25.0, "publish": 4.0}
# With the base, which is not the default one of the target.
MOVING = "mcore-debian12-cpu"


@pytest.fixture(scope="module")
def place(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with night_place(tool, tmp_path_factory.mktemp("place"), shared_folder(tmp_path_factory)) as running:
        yield running


@pytest.fixture(scope="module")
def night(tool: Tool, place: Place, selection: Selection) -> dict:
    """What a first night printed with --json."""
    done = replace(tool, env=place.env).run(*NIGHT, *place.words("team/first", "first"), "--json")
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_night_publishes_what_it_certified(night: dict, tool: Tool, place: Place) -> None:
    states = {step["name"]: step["state"] for step in night["steps"]}
    assert states["certify"] == states["publish"] == "done"
    (target,) = night["targets"]
    assert target["state"] == "good"
    (publication,) = place.published("team/first")
    assert publication.certified
    assert publication.moving_tag == MOVING
    with Ledger.open(tool.project / "state" / "ledger.sqlite") as ledger:
        (row,) = ledger.rows(PublicationRow)
        assert row.oci_digest == publication.oci_digest
        (certificate,) = ledger.rows(CertificateRow)
        assert certificate.digest == publication.certificate_digest
        assert len(ledger.rows(CaseRow)) == certificate.cases == CASES
    printed = tool.run("status").stdout
    assert "good" in printed
    assert f"envbuild pull {place.host}/team/first:{MOVING} --target cpu --format sqsh" in printed


@pytest.mark.slow
def test_the_next_night_does_nothing(night: dict, tool: Tool, place: Place) -> None:
    own = replace(tool, env=place.env)
    planned = json.loads(own.run(*NIGHT, *place.words("team/first", "first"), "--plan", "--json").stdout)
    assert not [step for step in planned["plan"] if step["to_do"]]
    second = json.loads(own.run(*NIGHT, *place.words("team/first", "first"), "--json").stdout)
    assert {step["state"] for step in second["steps"]} == {"nothing"}
    assert sum(step["bytes_sent"] for step in second["steps"]) == 0
    assert len(place.published("team/first")) == 1


@pytest.mark.slow
def test_a_runner_that_has_nothing_but_the_shared_state_knows_what_there_is(
    night: dict, tool: Tool, place: Place, tmp_path: Path
) -> None:
    runner = Tool(tmp_path, tool.cache, env=place.env)
    state = place.words("team/first", "first")[4:6]
    (target,) = json.loads(runner.run("status", *state, "--json").stdout)["targets"]
    assert target["state"] == "good"
    assert target["image"]["repository"] == f"{place.host}/team/first"


@pytest.mark.slow
def test_a_lost_ledger_is_made_anew_from_what_is_published(
    night: dict, tool: Tool, place: Place, tmp_path: Path
) -> None:
    runner = Tool(tmp_path, tool.cache, env=place.env)
    runner.run("ledger", "rebuild", "--from", f"{place.host}/team/first")
    (target,) = json.loads(runner.run("status", "--json").stdout)["targets"]
    assert target["image"] == night["targets"][0]["image"]


@pytest.mark.slow
def test_what_was_taken_back_elsewhere_is_good_no_more(night: dict, tool: Tool, place: Place, tmp_path: Path) -> None:
    """The next night looks at the repository, whose image another machine revoked."""
    own = replace(tool, env=place.env)
    own.run(*NIGHT, *place.words("team/revoked", "revoked"))
    (publication,) = place.published("team/revoked")
    words = ("--revoke", publication.oci_digest, "--reason", "wrong NCCL")
    Tool(tmp_path, tool.cache, env=place.env).run("publish", "--to", f"{place.host}/team/revoked", *words)
    refused = own.run(*NIGHT, *place.words("team/revoked", "revoked"), "--json", status=9)
    steps = {step["name"]: step for step in json.loads(refused.stdout)["steps"]}
    assert (steps["publish"]["error"]["reason"], steps["publish"]["attempts"]) == ("revoked", 1)
    with Ledger.open(tool.project / "state" / "ledger.sqlite") as ledger:
        rows = [row for row in ledger.rows(PublicationRow) if row.repository == f"{place.host}/team/revoked"]
    assert [(row.certified, row.revoked_reason) for row in rows] == [(False, "wrong NCCL")]


@pytest.mark.slow
def test_two_nights_of_a_stack_at_once_are_one(night: dict, tool: Tool, place: Place) -> None:
    own = replace(tool, env=place.env)
    held = tool.project / "state" / "nightly-mcore.lock"
    script = f"flock {held} sh -c 'echo held; cat'"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        refused = own.run(*NIGHT, *place.words("team/first", "first"), status=11)
        other.communicate(b"")
    assert "running already" in refused.stderr


def test_without_a_key_nothing_begins(tool: Tool, place: Place) -> None:
    refused = replace(tool, env=place.env).run(*NIGHT, "--to", f"{place.host}/team/first", "--key", "off", status=2)
    assert "--to needs --key" in refused.stderr


@dataclass
class KilledNights:
    """Nights of one project that are killed while a step runs, at a random moment of it."""

    tool: Tool
    place: Place
    repository: str
    prefix: str
    struck: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [*NIGHT, *self.place.words(self.repository, self.prefix)]

    def finish(self) -> list[dict]:
        """The steps of a night that is left alone."""
        steps: list[dict] = json.loads(self.tool.run(*self.words, "--json").stdout)["steps"]
        return steps

    def kill(self, step: str, seconds: float, blow: signal.Signals) -> None:
        """Kill a night so many seconds after a step began; what a moving tag names is whole then."""
        known = self._nights()
        process = self.tool.start(*self.words)
        try:
            # The step before it is in the ledger when it begins; a night that ends earlier is none the worse.
            while process.poll() is None and not self._has_begun(step, known):
                _wait(process, 0.1)
            _wait(process, seconds)
            running = self._running(known) if process.poll() is None else "ended"
            process.send_signal(blow)
            _, stderr = process.communicate()
        finally:
            process.kill()
        self.struck.append(f"{running} {blow.name}")
        assert process.returncode in (130, -signal.SIGKILL, 0), stderr
        assert "Traceback" not in stderr
        for publication in self.place.published(self.repository):
            assert_whole(self.place.registry(self.repository), publication.moving_tag)

    def _nights(self) -> set[str]:
        with Ledger.open(self.tool.project / "state" / "ledger.sqlite") as ledger:
            return {row.id for row in ledger.rows(NightRow)}

    def _steps(self, known: set[str]) -> list[str] | None:
        """The steps of the new night that ended; None before it began."""
        with Ledger.open(self.tool.project / "state" / "ledger.sqlite") as ledger:
            new = [row.id for row in ledger.rows(NightRow) if row.id not in known]
            return [row.name for row in ledger.rows(StepRow) if row.night == new[-1]] if new else None

    def _has_begun(self, step: str, known: set[str]) -> bool:
        steps = self._steps(known)
        return steps is not None and len(steps) >= CHAIN.index(step)

    def _running(self, known: set[str]) -> str:
        steps = self._steps(known)
        return "start" if steps is None else (*CHAIN, "end")[len(steps)]


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def assert_whole(registry: Registry, tag: str) -> None:
    """Every blob of the image that a tag names is there."""
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    manifest = json.loads(registry.ask("GET", f"manifests/{tag}", accept=(200,), headers=accept).body)
    for blob in (manifest["config"], *manifest["layers"]):
        registry.ask("HEAD", f"blobs/{blob['digest']}", accept=(200,))


def empty_project(tool: Tool, folder: Path, env: dict[str, str]) -> Tool:
    """A project with the locks of another one, and a store with its layers: the image is put together anew."""
    other = Tool(folder / "project", folder / "cache", env=env)
    (other.project / "state").mkdir(parents=True)
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    other.cache.mkdir()
    for kept in ("bases", "environments", "layers", "verifications"):
        if (tool.cache / kept).is_dir():
            (other.cache / kept).symlink_to(tool.cache / kept)
    return other


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(4, id="4"), pytest.param(20, id="20", marks=pytest.mark.soak)])
def test_killed_nights_end_with_the_same_digests(
    night: dict, tool: Tool, place: Place, tmp_path: Path, kills: int
) -> None:
    (wanted,) = place.published("team/first")
    dice, struck = random.Random(20261123), []
    for number in range(kills // len(AIMS)):
        repository, other = f"team/killed{kills}-{number}", empty_project(tool, tmp_path / str(number), place.env)
        nights = KilledNights(other, place, repository, repository)
        for step, seconds in AIMS.items():
            nights.kill(step, dice.uniform(0, seconds), dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT]))
        struck += nights.struck
        print(f"killed while this ran: {nights.struck}")
        assert {step["state"] for step in nights.finish()} <= {"done", "nothing"}
        (publication,) = place.published(repository)
        assert (publication.oci_digest, publication.lock_digest, publication.tag) == (
            wanted.oci_digest,
            wanted.lock_digest,
            wanted.tag,
        )
        assert publication.sqsh is not None
        assert wanted.sqsh is not None
        assert publication.sqsh.digest == wanted.sqsh.digest
        began = time.monotonic()
        assert {step["state"] for step in nights.finish()} == {"nothing"}
        print(f"a night with nothing new: {time.monotonic() - began:.1f} s")
        assert not list((other.cache / "staging").glob("*/*"))
        shutil.rmtree(other.project / "out")
    print(json.dumps(Counter(struck), sort_keys=True))


def publish_fails(own: Tool, *words: str) -> str:
    """The message of a night whose publication alone fails, and by the infrastructure."""
    done = own.run(*NIGHT, *words, "--json", status=10)
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    assert {steps[name]["state"] for name in CHAIN[:-1]} <= {"done", "nothing"}
    error = steps["publish"]["error"]
    assert (error["fault"], error["kind"], steps["publish"]["attempts"]) == ("infrastructure", "NetworkError", 2)
    assert PASSWORD not in done.stdout + done.stderr
    return f"{error['what']} {error['why']} {error['fix']}"


def goes_on(own: Tool, *words: str) -> None:
    """The next night publishes, and trains nothing again."""
    steps = {step["name"]: step for step in json.loads(own.run(*NIGHT, *words, "--json").stdout)["steps"]}
    assert (steps["certify"]["state"], steps["publish"]["state"]) == ("nothing", "done")


@pytest.mark.slow
def test_a_quota_that_is_exceeded_mid_push_loses_nothing(
    night: dict, tool: Tool, place: Place, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    manifest = place.registry("team/first").ask("GET", f"manifests/{MOVING}", accept=(200,), headers=accept).body
    largest = max(json.loads(manifest)["layers"], key=lambda layer: layer["size"])["digest"]
    program = registry_program(shared_folder(tmp_path_factory) / "docker-registry")
    body = json.dumps({"errors": [{"code": "DENIED", "message": "quota exceeded"}]}).encode()
    with docker_registry(program, tmp_path / "small") as address, fault_proxy(address) as proxy:
        quota = proxy.add(method="PUT", path=largest, status=403, body=body)
        own, words = replace(tool, env=place.env), place.words("team/first", "first")
        words[1] = f"{proxy.host}/team/quota"
        assert "quota exceeded" in publish_fails(own, *words)
        assert quota.seen
        registry = Registry(parse_address(f"oci://{proxy.host}/team/quota"), None, {**os.environ, **own.env})
        assert list(read_index(registry)) == []
        quota.times = 0
        goes_on(own, *words)
        (publication,) = read_index(registry)
        assert_whole(registry, publication.moving_tag)
