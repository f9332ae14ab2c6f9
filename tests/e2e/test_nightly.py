"""Nights of stack mcore on target cpu: a registry with TLS and a password, an object store, a shared ledger."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conftest import Tool, shared_folder
from helpers.stores import (
    BUCKET,
    PASSWORD,
    S3_KEYS,
    USER,
    docker_registry,
    registry_program,
    s3_server,
    write_docker_config,
)

from envbuild.catalog.catalog import Selection
from envbuild.catalog.site import CA_FILES
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import CaseRow, CertificateRow, PublicationRow
from envbuild.oci.push import digest_of_tag
from envbuild.publish.index import read_index
from envbuild.publish.models import Publication
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry

NIGHT = ("nightly", "--stack", "mcore", "--targets", "cpu", "--base", "debian12")
CASES = 15
# With the base, which is not the default one of the target.
MOVING = "mcore-debian12-cpu"


@dataclass(frozen=True)
class Place:
    """Where nights publish, and an account that may."""

    host: str
    ca: Path
    env: dict[str, str]
    keys: Path

    def registry(self, repository: str) -> Registry:
        return Registry(parse_address(f"oci://{self.host}/{repository}"), self.ca, {**os.environ, **self.env})

    def published(self, repository: str) -> list[Publication]:
        """What the index names; every tag of it names what it says."""
        registry = self.registry(repository)
        found = list(read_index(registry))
        for item in found:
            assert digest_of_tag(registry, item.tag) == item.oci_digest
            assert digest_of_tag(registry, item.moving_tag) == item.oci_digest
        return found

    def words(self, repository: str, prefix: str) -> list[str]:
        """The options of a night that publishes there."""
        where = ["--to", f"{self.host}/{repository}", "--sqsh-to", f"s3://{BUCKET}/{prefix}/sqsh"]
        own = ["--key", str(self.keys / "lab.key"), "--trust", str(self.keys / "trust.toml")]
        return [*where, "--state", f"s3://{BUCKET}/{prefix}/state", *own]


@pytest.fixture(scope="module")
def place(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    binary = registry_program(shared_folder(tmp_path_factory) / "docker-registry")
    folder = tmp_path_factory.mktemp("registry") / "secure"
    keys = tmp_path_factory.mktemp("keys")
    tool.run("certificate", "keygen", "--out", str(keys), "--name", "lab")
    (keys / "trust.toml").write_text('[keys.lab]\nfile = "lab.pub"\n')
    with docker_registry(binary, folder, password=True, tls=True) as address, s3_server() as s3:
        host = address.removeprefix("https://")
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        config = write_docker_config(folder / "docker", {"auths": {host: {"auth": auth}}})
        # uv and git go on with the CAs of the machine.
        bundle = folder / "bundle.pem"
        own = next((Path(name).read_text() for name in CA_FILES if Path(name).is_file()), "")
        bundle.write_text(own + (folder / "ca.pem").read_text())
        env = {**config, **S3_KEYS, "AWS_ENDPOINT_URL": s3, "SSL_CERT_FILE": str(bundle), "NO_PROXY": "127.0.0.1"}
        yield Place(host, folder / "ca.pem", {**env, "no_proxy": "127.0.0.1"}, keys)


@pytest.fixture(scope="module")
def night(tool: Tool, place: Place, selection: Selection) -> dict:
    """What a first night printed with --json."""
    done = replace(tool, env=place.env).run(*NIGHT, *place.words("team/first", "first"), "--json")
    return json.loads(done.stdout)


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


def test_the_next_night_does_nothing(night: dict, tool: Tool, place: Place) -> None:
    own = replace(tool, env=place.env)
    planned = json.loads(own.run(*NIGHT, *place.words("team/first", "first"), "--plan", "--json").stdout)
    assert not [step for step in planned["plan"] if step["to_do"]]
    second = json.loads(own.run(*NIGHT, *place.words("team/first", "first"), "--json").stdout)
    assert {step["state"] for step in second["steps"]} == {"nothing"}
    assert sum(step["bytes_sent"] for step in second["steps"]) == 0
    assert len(place.published("team/first")) == 1


def test_a_runner_that_has_nothing_but_the_shared_state_knows_what_there_is(
    night: dict, tool: Tool, place: Place, tmp_path: Path
) -> None:
    runner = Tool(tmp_path, tool.cache, env=place.env)
    state = place.words("team/first", "first")[4:6]
    (target,) = json.loads(runner.run("status", *state, "--json").stdout)["targets"]
    assert target["state"] == "good"
    assert target["image"]["repository"] == f"{place.host}/team/first"


def test_a_lost_ledger_is_made_anew_from_what_is_published(
    night: dict, tool: Tool, place: Place, tmp_path: Path
) -> None:
    runner = Tool(tmp_path, tool.cache, env=place.env)
    runner.run("ledger", "rebuild", "--from", f"{place.host}/team/first")
    (target,) = json.loads(runner.run("status", "--json").stdout)["targets"]
    assert target["image"] == night["targets"][0]["image"]


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


def kill_nights(other: Tool, place: Place, kills: int, seed: int, longest: float) -> None:
    """Kill nights at random moments. What a moving tag names is whole after each."""
    dice = random.Random(seed)
    for number in range(kills):
        blow = signal.SIGKILL if number % 4 else signal.SIGINT
        process = other.start(*NIGHT, *place.words("team/killed", "killed"))
        # At least until Python has come as far as envbuild.
        limit = dice.uniform(1.0, longest)
        try:
            process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(blow)
            _, stderr = process.communicate()
            assert process.returncode in (130, -signal.SIGKILL, 0), stderr
            assert "Traceback" not in stderr
        place.published("team/killed")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(4, id="4"), pytest.param(20, id="20", marks=pytest.mark.soak)])
def test_killed_nights_end_with_the_same_digests(
    night: dict, tool: Tool, place: Place, tmp_path: Path, kills: int
) -> None:
    (wanted,) = place.published("team/first")
    other = Tool(tmp_path / "elsewhere", tmp_path / "cache", env=place.env)
    other.project.mkdir()
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    other.cache.mkdir()
    for kept in ("bases", "environments", "layers", "verifications"):
        if (tool.cache / kept).is_dir():
            (other.cache / kept).symlink_to(tool.cache / kept)
    started = time.monotonic()
    kill_nights(other, place, kills, seed=20261123, longest=45.0)
    last = json.loads(other.run(*NIGHT, *place.words("team/killed", "killed"), "--json").stdout)
    assert {step["state"] for step in last["steps"]} <= {"done", "nothing"}
    (found,) = place.published("team/killed")
    assert (found.oci_digest, found.lock_digest, found.tag) == (wanted.oci_digest, wanted.lock_digest, wanted.tag)
    assert found.sqsh is not None
    assert wanted.sqsh is not None
    assert found.sqsh.digest == wanted.sqsh.digest
    nothing = json.loads(other.run(*NIGHT, *place.words("team/killed", "killed"), "--json").stdout)
    assert {step["state"] for step in nothing["steps"]} == {"nothing"}
    assert not list((other.cache / "staging").glob("*/*"))
    print(f"{kills} kills in {time.monotonic() - started:.0f} s")
