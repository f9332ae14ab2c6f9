"""What is run is the same wherever it runs; what is seen there differs."""

import importlib
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import APIError
from helpers.errors import error_of

from envbuild.core.errors import CertificationCannotRunError, CertificationFailedError
from envbuild.core.process import Finished
from envbuild.core.progress import SilentReporter
from envbuild.image.docker.engine import Engine
from envbuild.launch import bwrap
from envbuild.launch.docker import DockerExecutor
from envbuild.launch.executors import LaunchRequest, Task
from envbuild.launch.launchers import LAUNCHERS, ON_CLUSTER, WORDS, Placement, open_executor
from envbuild.launch.open_image import OpenImage
from envbuild.launch.runtimes import Runtime

SCRIPT = "import os, sys; print(sys.argv[1:]); print(os.environ['PYTHONUNBUFFERED'], os.getcwd())"


@pytest.fixture
def task(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "smoke.pyz").write_text(SCRIPT)
    (tmp_path / "results").mkdir()
    return Task(
        plan=tmp_path / "plan.json", runner=tmp_path / "smoke.pyz", results=tmp_path / "results", arguments=("--more",)
    )


def test_image_sees_the_task(task, tmp_path, monkeypatch):
    seen = {}

    def run(argv, **options):
        seen.update(options, argv=argv)
        return Finished(status=0, output="", seconds=0.0)

    monkeypatch.setattr(bwrap, "run", run)
    runtime = Runtime(name="loop", bwrap=Path("/usr/bin/bwrap"), opener=lambda sqsh, place: ["open", sqsh, place])
    image = OpenImage(runtime=runtime, sqsh=tmp_path / "x", rootfs=tmp_path / "root", variables={"OWN": "1"})
    bwrap.run_task(image, task, "/venv/bin/python", Path("/x/image.sqsh"), {"NCCL_DEBUG": "INFO"})
    words = [str(word) for word in seen["argv"]]
    assert words[:4] == ["open", str(tmp_path / "x"), str(tmp_path / "root"), "/usr/bin/bwrap"]
    assert words[words.index("/venv/bin/python") :] == [
        "/venv/bin/python", "/envbuild/plan/smoke.pyz", "run", "--plan", "/envbuild/plan/plan.json",
        "--out", "/envbuild/results", "--image", "/envbuild/image/image.sqsh", "--more",
    ]  # fmt: skip
    bound = {words[index + 2]: (word, words[index + 1]) for index, word in enumerate(words) if word.endswith("bind")}
    assert bound["/envbuild/plan/plan.json"] == ("--ro-bind", str(task.plan))
    assert bound["/envbuild/plan/smoke.pyz"] == ("--ro-bind", str(task.runner))
    assert bound["/envbuild/image/image.sqsh"] == ("--ro-bind", "/x/image.sqsh")
    assert bound["/envbuild/results"] == ("--bind", str(task.results))
    variables = seen["options"].env
    assert {name: variables[name] for name in ("OWN", "NCCL_DEBUG", "PYTHONUNBUFFERED")} == {
        "OWN": "1", "NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert seen["options"].error is CertificationFailedError


class Daemon:
    """The SDK's client of a daemon that runs containers, and stops none."""

    def __init__(self):
        self.containers = []

    def version(self):
        return {}

    def info(self):
        return {}

    def inspect_image(self, name):
        return {"Id": name}

    def create_host_config(self, **values):
        return values

    def create_container(self, image, **values):
        self.containers.append("x")
        return {"Id": "x"}

    def attach_socket(self, name, params):
        return io.BytesIO()

    def start(self, name):
        assert name in self.containers

    def logs(self, name, **options):
        yield b"trained\n"

    def wait(self, name):
        return {"StatusCode": 0}

    def stop(self, name, timeout):
        raise APIError("cannot stop container")

    def remove_container(self, name, force):
        assert force
        self.containers.remove(name)


def test_container_that_cannot_be_stopped_is_removed(task, tmp_path):
    daemon = Daemon()
    record = SimpleNamespace(config_digest="sha256:1", oci_digest="sha256:2", python="python")
    image = SimpleNamespace(path=tmp_path, record=record)
    engine = Engine(daemon, "unix:///s", "")
    way = DockerExecutor(image=image, engine=engine, tag="mcore:cpu", reporter=SilentReporter())
    assert way.run(task).output == "trained\n"
    assert daemon.containers == []


def requested(venv):
    return LaunchRequest(
        form="none", image=None, on_gpus=False, extra={}, results=venv, runtime=None, venv=venv,
        reporter=SilentReporter(),
    )  # fmt: skip


def test_words_of_the_command_line_name_each_launcher_and_each_form():
    assert [str(Placement.parse(word)) for word in WORDS] == ["sqsh", "oci", "docker", "venv", "here"]
    assert {Placement.parse(word).launcher for word in WORDS} | {*ON_CLUSTER} == set(LAUNCHERS)
    # What a certificate made on a cluster says; the option there is --in sqsh.
    assert [str(Placement(launcher=launcher)) for launcher in ON_CLUSTER] == ["sqsh"]
    for launcher in LAUNCHERS:
        assert callable(importlib.import_module(f"envbuild.launch.{launcher}").open_executor)
    with pytest.raises(ValueError, match="'moon' is none of sqsh, oci, docker"):
        Placement.parse("moon")


def test_environment_without_an_image_is_given_none_to_hash(task, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    way = open_executor("venv", requested(tmp_path / "venv"))
    done = way.run(task)
    words = ["run", "--plan", str(task.plan), "--out", str(task.results), "--more"]
    assert done.output.splitlines() == [str(words), f"1 {task.results}"]
    assert (way.name, way.python) == ("venv", str(tmp_path / "venv/bin/python"))


def test_task_that_runs_too_long_is_ended(task, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    task.runner.write_text("import time; time.sleep(3600)")
    late = Task(plan=task.plan, runner=task.runner, results=task.results, timeout_seconds=0.5)
    with pytest.raises(CertificationFailedError, match="ran longer than"):
        open_executor("here", requested(task.results)).run(late)


def test_venv_that_is_not_there_is_refused(tmp_path):
    error = error_of(CertificationCannotRunError, open_executor, "venv", requested(tmp_path / "none"))
    assert error.reason == "no-environment"
    assert "envbuild sync --into" in error.fix


def test_here_is_what_python_is_called_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("python", "python3"):
        (tmp_path / name).symlink_to(sys.executable)
        assert open_executor("here", requested(tmp_path)).python == str(tmp_path / "python")
    (tmp_path / "python").unlink()
    assert open_executor("here", requested(tmp_path)).python == str(tmp_path / "python3")
    (tmp_path / "python3").unlink()
    assert error_of(CertificationCannotRunError, open_executor, "here", requested(tmp_path)).reason == "no-environment"
