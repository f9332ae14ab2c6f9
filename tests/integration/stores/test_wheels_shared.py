"""`envbuild wheels` with remote stores: real registries and S3 services, real builds with nvcc, two machines."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.fault_proxy import FaultProxy, fault_proxy
from helpers.simple_index import SimpleIndex
from helpers.stack_files import write_target
from helpers.stores import (
    BUCKET,
    PASSWORD,
    S3_KEYS,
    USER,
    docker_registry,
    keep_wheel,
    record_of,
    registry_program,
    s3_server,
    write_docker_config,
)
from integration.test_wheels import SELECT, compiled, counted, locked, own, wheels
from unit.wheels.test_key import PARTS

from envbuild.core.progress import SilentReporter
from envbuild.store.connect import open_remote
from envbuild.store.document import describe
from envbuild.store.local import LocalStore
from envbuild.wheels.cache.entry import KIND, Built, index_path_of, read_record

# Fixtures that are used by name.
__all__ = ["counted", "own"]
KEY = PARTS.key
OTHER = PARTS.model_copy(update={"sm": ("80",)})


@pytest.fixture(
    params=[pytest.param("oci", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.slow), "file"]
)
def place(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A configuration file with the store `ours` of one kind, and the proxy before it."""
    yield from _place(request.param, tmp_path, tmp_path_factory)


@pytest.fixture(params=["oci", "s3"])
def served(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What speaks HTTP."""
    yield from _place(request.param, tmp_path, tmp_path_factory)


@pytest.fixture
def bucket(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _place("s3", tmp_path, tmp_path_factory)


@pytest.fixture
def directory(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _place("file", tmp_path, tmp_path_factory)


def _place(kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if kind == "file":
        (tmp_path / "share").mkdir()
        yield Place(tmp_path, f"file://{tmp_path}/share")
    elif kind == "oci":
        program = registry_program(shared_folder(tmp_path_factory) / "docker-registry")
        with docker_registry(program, tmp_path / "registry", password=True) as server, fault_proxy(server) as proxy:
            yield Place(tmp_path, f"oci://{proxy.host}/team/wheels", proxy)
    else:
        with s3_server() as server, fault_proxy(server) as proxy:
            yield Place(tmp_path, f"s3://{BUCKET}/wheels", proxy)


class Place:
    """Where the store is, and machines that are configured with it."""

    def __init__(self, folder: Path, url: str, proxy: FaultProxy | None = None) -> None:
        self.folder = folder
        self.url = url
        self.proxy = proxy or FaultProxy()
        self.env = {**S3_KEYS, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        if url.startswith("oci"):
            auth = {"username": USER, "password": PASSWORD}
            self.env |= write_docker_config(folder / "docker", {"auths": {self.proxy.host: auth}})

    def variables(self, mode: str = "read-write") -> dict[str, str]:
        """What configures a machine with it."""
        file = self.folder / f"{mode}.toml"
        endpoint = f'endpoint = "{self.proxy.address}"\n' if self.url.startswith("s3") else ""
        file.write_text(f'[stores.ours]\nurl = "{self.url}"\nmode = "{mode}"\n{endpoint}')
        return {**self.env, "ENVBUILD_CONFIG": str(file)}

    def machine(self, name: str, mode: str = "read-write") -> Tool:
        """A machine of its own: another cache, another project."""
        project = self.folder / name
        project.mkdir(exist_ok=True)
        return Tool(project, self.folder / f"cache-{name}", self.variables(mode))


def kept(machine: Tool, parts: Any = PARTS, module: str = "") -> Built:
    return keep_wheel(LocalStore(machine.cache, SilentReporter()), parts, machine.project, module=module)


def asked(machine: Tool, *arguments: str, status: int = 0) -> dict[str, Any]:
    done = machine.run("wheels", *arguments, "--json", status=status)
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert S3_KEYS["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_wheels_go_there_and_come_back(place: Place) -> None:
    one, two = place.machine("one"), place.machine("two")
    first, second = kept(one), kept(one, OTHER)
    assert asked(one, "push", KEY[:15])["pushed"] == {KEY: "pushed"}
    assert asked(one, "push", "--all")["pushed"] == {KEY: "there already", OTHER.key: "pushed"}

    listed = asked(two, "list", "--store", "ours")
    assert [item["record"]["key"] for item in listed["wheels"]] == sorted([KEY, OTHER.key])
    assert (listed["store"], listed["refused"]) == (place.url, {})
    assert asked(two, "list")["wheels"] == []
    shown = asked(two, "show", KEY[7:20], "--store", "ours")
    assert shown["record"] == json.loads(first.record.model_dump_json(by_alias=True))
    assert asked(two, "verify", "--store", "ours") == {"verified": 2}

    assert asked(two, "pull", OTHER.key)["pulled"] == {OTHER.key: "pulled"}
    assert asked(two, "pull", "--all")["pulled"] == {KEY: "pulled", OTHER.key: "here already"}
    assert asked(two, "verify") == {"verified": 2}
    here = {item["record"]["key"]: item for item in asked(two, "list")["wheels"]}
    assert Path(here[KEY]["path"]).read_bytes() == first.wheel.read_bytes()
    provenance = second.provenance()
    assert provenance is not None
    assert here[OTHER.key]["provenance"] == json.loads(provenance.model_dump_json(by_alias=True))


@pytest.mark.slow
def test_a_swapped_entry_is_found_refused_and_replaced(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key A's content under key B, by hand."""
    one, two = bucket.machine("one"), bucket.machine("two")
    kept(one)
    other = kept(one, OTHER)
    asked(one, "push", OTHER.key)
    for name, value in bucket.env.items():
        monkeypatch.setenv(name, value)
    remote = open_remote(bucket.url, endpoint=bucket.proxy.address)
    record = json.loads(other.record.model_dump_json(by_alias=True))
    document = describe(KIND, KEY, index_path_of(PARTS), other.path, record)
    assert remote.backend.create(KIND, KEY, document.index_path, document.as_bytes(), document.files)

    error = asked(two, "verify", "--store", "ours", status=5)["error"]
    assert error["what"].startswith("1 of 2 entries of the store")
    assert "it has another key" in error["why"]
    assert KEY in asked(two, "list", "--store", "ours")["refused"]
    refused = asked(two, "pull", "--all", status=5)["error"]
    assert "1 of 2 wheels" in refused["what"]
    assert [item["record"]["key"] for item in asked(two, "list")["wheels"]] == [OTHER.key], "the good one was taken"

    assert asked(one, "push", KEY)["pushed"] == {KEY: "another one is there"}
    assert asked(one, "push", KEY, "--replace")["pushed"] == {KEY: "replaced a damaged one"}
    assert asked(two, "pull", KEY)["pulled"] == {KEY: "pulled"}
    assert asked(two, "verify", "--store", "ours") == {"verified": 2}


def test_which_store_is_said_where_it_is_not_clear(tmp_path: Path, directory: Place) -> None:
    one = directory.machine("one")
    kept(one)
    assert "no remote store" in asked(Tool(one.project, one.cache), "push", KEY, status=2)["error"]["what"]
    file = Path(one.env["ENVBUILD_CONFIG"])
    file.write_text(file.read_text() + f'[stores.second]\nurl = "file://{tmp_path}/second"\n')
    error = asked(one, "push", KEY, status=2)["error"]
    assert "ours, second" in error["why"]
    assert asked(one, "push", KEY, "--store", "second", status=10)["error"]["kind"] == "NetworkError"
    assert asked(one, "push", KEY, "--store", "third", status=3)["error"]["kind"] == "ConfigurationError"
    assert asked(one, "push", KEY, "--store", "ours")["pushed"] == {KEY: "pushed"}
    assert "no wheel has" in asked(one, "pull", "zz", "--store", "ours", status=3)["error"]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("push", KEY), ("pull", "--all")])
def test_ctrl_c_ends_a_command_whose_store_does_not_answer(served: Place, arguments: tuple[str, ...]) -> None:
    one = served.machine("one")
    first = kept(one)
    asked(one, "push", KEY)
    reached, over = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        over.wait(300)

    served.proxy.add(path="manifests/wheels-" if served.url.startswith("oci") else "entries/wheels/", hold=hang)
    process = one.start("wheels", *arguments)
    try:
        assert reached.wait(300)
        process.send_signal(signal.SIGINT)
        out, noise = process.communicate(timeout=300)
        assert process.returncode == 130, out + noise
        assert "Traceback" not in noise
    finally:
        over.set()
        process.kill()
    served.proxy.faults.clear()
    assert first.wheel.is_file()
    assert asked(one, "verify") == {"verified": 1}


def test_prune_says_what_would_go_and_then_removes_it(directory: Place) -> None:
    one = directory.machine("one")
    first, second = kept(one), kept(one, OTHER)
    builds = one.cache / "wheel-builds" / ("1" * 64)
    builds.mkdir(parents=True)
    (builds / "kernel.o").write_bytes(b"x" * 5000)
    said = asked(one, "prune", "--unused-days", "0", "--dry-run")
    assert said["dry_run"] is True
    assert {item["key"] for item in said["removed"]} == {KEY[7:], OTHER.key[7:], "1" * 64}
    assert said["size_bytes"] > 5000
    assert len(asked(one, "list")["wheels"]) == 2
    assert asked(one, "prune")["removed"] == []
    done = one.run("wheels", "prune", "--unused-days", "0").stdout
    assert first.record.file in done
    assert "removed: 3 entries of the cache directory" in done
    assert asked(one, "list")["wheels"] == []
    assert not builds.exists()
    assert not second.path.exists()


def test_a_second_machine_compiles_nothing(place: Place, own: Tool, index: SimpleIndex, tmp_path: Path) -> None:
    """Built by one, pushed after its check, taken by another that has other compilers, too."""
    own.env |= place.variables()
    locked(own, index, tmp_path)
    lock = json.loads(own.run("lock", "--stack", "k", "--json").stdout)
    (built,) = wheels(own)["wheels"]
    assert (built["built"], built["pushed"]) == (True, {place.url: "pushed"})
    assert built["provenance"]["lock"] == lock["digest"]
    log = (Path(built["path"]).parent / "build.log").read_text()
    assert "STORE/wheel-builds/" in log
    assert not [place for place in (str(own.cache), sys.prefix) if place in log]

    one, own.cache = own.cache, tmp_path / "cache-two"
    own.env |= place.variables("read")
    (taken,) = wheels(own)["wheels"]
    assert (taken["built"], taken["fetched"], taken["pushed"]) == (False, place.url, {})
    assert taken["record"] == built["record"]
    (again,) = wheels(own)["wheels"]
    assert again["fetched"] == ""
    assert compiled(tmp_path) == 1

    own.cache = tmp_path / "cache-three"
    own.env |= {"CUDA_HOME": str(tmp_path / "no toolkit")}
    result = json.loads(own.run("sync", *SELECT, "--into", "venv", "--json").stdout)
    assert result["wheels"] == {"kernels": built["record"]["key"]}
    assert compiled(tmp_path) == 1
    assert one.is_dir()


@pytest.mark.slow
def test_a_wheel_for_another_sm_under_a_forged_record_is_not_taken(
    bucket: Place, own: Tool, index: SimpleIndex, tmp_path: Path
) -> None:
    """The record is right in every digest and says what it should; what was compiled says otherwise."""
    locked(own, index, tmp_path)
    (right,) = wheels(own)["wheels"]
    write_target(own.project, "gpu", sm=("80",))
    (wrong,) = wheels(own)["wheels"]
    write_target(own.project, "gpu", sm=("90",))
    parts = read_record(Path(right["path"]).parent).parts
    folder = tmp_path / "forged"
    shutil.copytree(Path(wrong["path"]).parent, folder)
    record = record_of(parts, folder / Path(wrong["path"]).name)
    for sm, why in ((("90",), "which differs from its record"), (("80",), "and its key is for sm_90")):
        said = record.model_copy(update={"sm": sm})
        (folder / "wheel.json").write_text(said.model_dump_json(by_alias=True))
        remote = open_remote(f"file://{tmp_path / sm[0]}")
        (tmp_path / sm[0]).mkdir()
        content = json.loads(said.model_dump_json(by_alias=True))
        remote.push(KIND, parts.key, index_path_of(parts), folder, content)
        own.cache = tmp_path / f"cache-{sm[0]}"
        before = compiled(tmp_path)
        done = own.run("wheels", *SELECT, "--json", "--store", f"file://{tmp_path / sm[0]}")
        assert json.loads(done.stdout)["wheels"][0]["built"] is True
        assert "not taken" in done.stderr
        assert f"it contains sm_80, {why}" in done.stderr
        assert compiled(tmp_path) == before + 1
