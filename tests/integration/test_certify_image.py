"""`certify` in a real image that has no torch: a fake runner reports what it saw inside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import time
import zipapp
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from docker import DockerClient
from helpers.docker_daemon import Daemon
from helpers.mini import NAME
from helpers.processes import forked, wait_until
from helpers.smoke_plans import case_document, plan_document

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.certify.certify import CertifyOptions, certify
from envbuild.certify.issue import Certification
from envbuild.certify.run import job
from envbuild.certify.run.job import CertifyRequest
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import CertificationCannotRunError, CertificationFailedError, CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.core.sandbox import Sandbox
from envbuild.image.docker.engine import open_engine
from envbuild.image.output import PlacedImage, find_image
from envbuild.launch import open_image
from envbuild.launch.bwrap import layers_of
from envbuild.launch.docker import RESULTS_LABEL, DockerExecutor
from envbuild.launch.executors import Task
from envbuild.launch.launchers import Placement
from envbuild.launch.open_image import open_layers
from envbuild.lock.lockdir import find_lock
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.write import docker_manifest
from envbuild.store.local import LocalStore

ROOT = Path(__file__).parents[2]
FAKE_RUNNER = ROOT / "tests" / "helpers" / "fake_runner.py"
# The real runner, with ranks that need no torch: they train nothing, and for long.
LONG_RUNNER = """\
import os, sys, threading
from envbuild_smoke import cli, runner
from envbuild_smoke.run import context

def run_plan(plan, cases, out, *, stop, **_):
    print("training", flush=True)
    with open(out / "beats", "ab", buffering=0) as beats:
        while not {stopped}:
            beats.write(b".")
            stop.wait(0.05)
    raise context.RunInterruptedError

runner.run_plan = run_plan
sys.exit(cli.main())
"""


def fake_runner(folder: Path, port: int) -> tuple[Path, str]:
    """The fake runner as a zipapp, and its digest."""
    file = folder / "smoke.pyz"
    with zipfile.ZipFile(file, "w") as archive:
        source = FAKE_RUNNER.read_text()
        assert "\nPORT = 0\n" in source
        archive.writestr("__main__.py", source.replace("\nPORT = 0\n", f"\nPORT = {port}\n"))
    return file, sha256_file(file)


def certified(mini: Tool, tmp_path: Path, place: str) -> Certification:
    """What comes of certifying the small image in one of its forms."""
    selection = select(Catalog.open(mini.project), NAME, "cpu", None, HostDistribution.here())
    request = CertifyRequest(
        selection=selection,
        lock=find_lock(mini.project, selection),
        image=find_image(mini.project / "out", NAME, selection.base_name, "cpu"),
        matrix_name="certify-quick",
        out_dir=tmp_path / "out",
        place=Placement.parse(place),
    )
    store = LocalStore(tmp_path / "store", SilentReporter())
    return certify(request, Context(store=store, site=load_site(), reporter=SilentReporter()), CertifyOptions())


def seen_inside(mini: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str = "sqsh") -> Certification:
    """The same with the fake runner, and with somebody outside who listens on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(job, "smoke_file", lambda store: fake_runner(tmp_path, listening.getsockname()[1]))
        done = certified(mini, tmp_path, place)
    assert done.ran
    return done


def variables(done: Certification) -> dict[str, str]:
    machine = done.statement.predicate.measured.machine
    assert machine is not None
    return machine.variables


@pytest.mark.slow
def test_fake_runner_would_reach_the_machine_outside_if_it_had_its_network(
    mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests of REACHED can fail."""
    monkeypatch.setattr(open_image, "Sandbox", functools.partial(Sandbox, network=True))
    assert variables(seen_inside(mini, tmp_path, monkeypatch))["REACHED"] == "True"


def docker_digest(image: dict[str, Any]) -> str:
    """The digest that the image has where registries know docker's manifests alone."""
    files = FolderFiles(Path(image["path"]) / "oci")
    return sha256_bytes(docker_manifest(files.read(blob_path(image["record"]["oci_digest"]))))


@pytest.mark.parametrize(("place", "runtime"), [("oci", "layers"), ("sqsh", None)])
def test_cases_have_loopback_alone_and_subjects_are_what_the_runner_hashed(
    mini: Tool,
    mini_image: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    runtime: str | None,
) -> None:
    done = seen_inside(mini, tmp_path, monkeypatch, place)
    seen = variables(done)
    assert (seen["INTERFACES"], seen["REACHED"]) == ("lo", "False")
    record = mini_image["record"]
    digests = {"oci": [record["oci_digest"]], "sqsh": [record["oci_digest"], record["sqsh"]["digest"]]}[place]
    assert list(done.statement.digests().values()) == [*digests, docker_digest(mini_image)]
    assert done.statement.predicate.measured.image.file_digest == digests[-1]  # type: ignore[union-attr]
    assert runtime in (None, done.statement.predicate.runtime)


def test_docker_runs_the_image_with_that_digest_without_a_network(
    mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dockerd: Daemon
) -> None:
    monkeypatch.setenv("DOCKER_HOST", dockerd.host)
    done = seen_inside(mini, tmp_path, monkeypatch, "docker")
    seen = variables(done)
    assert (seen["INTERFACES"], seen["REACHED"]) == ("lo", "False")
    subjects = done.statement.by_form()
    assert subjects == {"oci": mini_image["record"]["oci_digest"], "docker": docker_digest(mini_image)}
    assert done.statement.predicate.runtime == open_engine(otherwise="").version
    results = done.certificate.parent / "run" / "results" / "results.jsonl"
    assert results.stat().st_uid == os.getuid()
    with containers(dockerd) as there:
        assert there.list(all=True) == []
        # What an envbuild that was killed left of the same goes before anything else is done.
        there.create(mini_image["record"]["config_digest"], labels={RESULTS_LABEL: str(results.parent.resolve())})
        done.certificate.unlink()
        runner = tmp_path / "smoke.pyz"
        monkeypatch.setattr(job, "smoke_file", lambda store: (runner, sha256_file(runner)))
        certified(mini, tmp_path, "docker")
        assert there.list(all=True) == []


@pytest.fixture
def image(mini: Tool, mini_image: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dockerd: Daemon) -> PlacedImage:
    """The small image, where the Docker daemon is the tests' own."""
    monkeypatch.setenv("DOCKER_HOST", dockerd.host)
    return find_image(mini.project / "out", NAME, Path(mini_image["path"]).name.split("-")[1], "cpu")


def in_docker(image: PlacedImage, *, gpus: bool = False) -> DockerExecutor:
    engine = open_engine(otherwise="")
    return DockerExecutor(image=image, engine=engine, tag="mini:cpu", reporter=SilentReporter(), gpus=gpus)


def test_docker_without_gpus_names_what_is_missing(image: PlacedImage, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("plan.json", "smoke.pyz")}
    for path in files.values():
        path.write_text("{}")
    (tmp_path / "results").mkdir()
    task = Task(plan=files["plan.json"], runner=files["smoke.pyz"], results=tmp_path / "results")
    with pytest.raises(CertificationCannotRunError, match="cannot give GPUs to containers") as caught:
        in_docker(image, gpus=True).run(task)
    assert caught.value.reason == "no-runtime"


@pytest.mark.slow
def test_task_in_docker_that_runs_too_long_is_ended(image: PlacedImage, tmp_path: Path, dockerd: Daemon) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "smoke.pyz").write_text("import time; print('started', flush=True); time.sleep(3600)")
    (tmp_path / "results").mkdir()
    lines: list[str] = []
    task = Task(
        plan=tmp_path / "plan.json",
        runner=tmp_path / "smoke.pyz",
        results=tmp_path / "results",
        on_line=lines.append,
        timeout_seconds=15,
        log=tmp_path / "log",
    )
    with pytest.raises(CertificationFailedError, match="ran longer than 15 s"):
        in_docker(image).run(task)
    assert lines == ["started"]
    assert (tmp_path / "log").read_text() == "started\n"
    with contextlib.closing(DockerClient(base_url=dockerd.host)) as client:
        assert client.containers.list(all=True) == []


def long_task(folder: Path, stopped: str = "stop.is_set()") -> Task:
    """A task that trains until its runner gets a signal to stop; with ``stopped`` "False" it does not listen."""
    source = folder / "runner"
    shutil.copytree(ROOT / "smoke", source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "__main__.py").write_text(LONG_RUNNER.replace("{stopped}", stopped))
    zipapp.create_archive(source, folder / "smoke.pyz")
    (folder / "plan.json").write_text(json.dumps(plan_document(case_document("train-baseline"))))
    (folder / "results").mkdir()
    return Task(plan=folder / "plan.json", runner=folder / "smoke.pyz", results=folder / "results")


@contextlib.contextmanager
def containers(dockerd: Daemon) -> Iterator[Any]:
    """The daemon's containers; those that are left are removed."""
    with contextlib.closing(DockerClient(base_url=dockerd.host)) as client:
        try:
            yield client.containers
        finally:
            for container in client.containers.list(all=True):
                container.remove(force=True)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["stop.is_set()", "False"])
def test_container_ends_when_envbuild_is_killed(
    image: PlacedImage, tmp_path: Path, dockerd: Daemon, stopped: str
) -> None:
    """Also where the runner ignores the signal to stop."""
    task = long_task(tmp_path, stopped)
    with containers(dockerd) as there:
        with forked(lambda: in_docker(image).run(task)) as pid:
            wait_until((tmp_path / "results/beats").exists)
            (container,) = there.list()
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not there.list())
        container.reload()
        assert container.attrs["State"]["ExitCode"] == 130
        # What is left of it does not disturb the next one of the same, and no other container is touched.
        other = there.create(image.record.config_digest, command=["true"], labels={RESULTS_LABEL: "/elsewhere"})
        in_docker(image).remove_orphans(task.results)
        assert [container.id for container in there.list(all=True)] == [other.id]


@pytest.mark.slow
def test_next_run_ends_a_container_that_goes_on(image: PlacedImage, tmp_path: Path, dockerd: Daemon) -> None:
    task = long_task(tmp_path, "False")
    with containers(dockerd) as there, forked(lambda: in_docker(image).run(task)):
        wait_until((tmp_path / "results/beats").exists)
        in_docker(image).remove_orphans(task.results)
        assert there.list(all=True) == []
        written = (tmp_path / "results/beats").stat().st_size
        time.sleep(0.3)
        assert (tmp_path / "results/beats").stat().st_size == written


def test_layer_with_another_digest_is_refused_before_anything_runs(mini: Tool, mini_image: dict[str, Any]) -> None:
    selection = select(Catalog.open(mini.project), NAME, "cpu", None, HostDistribution.here())
    image = find_image(mini.project / "out", NAME, selection.base_name, "cpu")
    layers = layers_of(image)
    broken = [*layers[:-1], replace(layers[-1], digest="sha256:" + "0" * 64)]
    with pytest.raises(CheckRefusedError), open_layers(broken, {}):
        raise AssertionError("it was opened")
