"""Why a build failed, from what daemons say: one class of error each."""

import errno
import os
import socket

import pytest
from helpers.processes import NOBODY, in_child

from envbuild.core.errors import BuildError, CheckRefusedError, MachineError, NetworkError
from envbuild.image.docker.engine import open_engine
from envbuild.image.docker.running import build_failed
from envbuild.image.docker.trace import Step, Steps

# As dockerd 20.10 and 28, and podman 4.3 put it.
RAN = (
    "executor failed running [/bin/sh -c uv pip install]: exit code: 2",
    'process "/bin/sh -c uv pip install" did not complete successfully: exit code: 2',
    'building at STEP "RUN uv pip install": while running runtime: exit status 2',
)
NOT_PULLED = (
    'failed to solve with frontend dockerfile.v0: failed to do request: Head "https://127.0.0.1:9/v2/a": dial tcp',
    "docker.io/library/nothing@sha256:00: failed to resolve source metadata: not found",
    "pull access denied for nothing, repository does not exist or may require 'docker login'",
    'creating build container: initializing source docker://nothing: pinging container registry "r": Get: no route',
)


class Engine:
    def __init__(self, free=None):
        self.free = free

    def free_bytes(self):
        return self.free


def failed(error, output="", free=None, log=None):
    steps = Steps()
    steps.error = error
    steps._steps["a"] = Step(name="RUN x", error=error, lines=output.splitlines())
    return build_failed(steps, "build it", log, Engine(free))


@pytest.mark.parametrize("error", RAN)
def test_step_that_failed_is_told_with_its_output(error):
    found = failed(error, "x Failed to build\n error: hash mismatch for psutil")
    assert isinstance(found, BuildError)
    assert "a step exited with status 2" in found.what
    assert "hash mismatch for psutil" in found.why


@pytest.mark.parametrize("error", RAN)
def test_step_without_a_network_is_a_network_error(error):
    found = failed(error, "error: Failed to fetch: `https://robot:word@index/simple/psutil/`")
    assert isinstance(found, NetworkError)
    assert "word" not in found.why


@pytest.mark.parametrize("error", NOT_PULLED)
def test_base_that_is_not_had_is_a_network_error(error):
    found = failed(error)
    assert isinstance(found, NetworkError)
    assert "cannot pull the base image" in found.what


@pytest.mark.parametrize(
    ("error", "output", "free"),
    [
        ("failed to copy: write /data/x: no space left on device", "", None),
        (RAN[0], "OSError: [Errno 28] no space left on device", None),
        (RAN[0], "Bus error", 1 << 20),
    ],
)
def test_full_disk_of_the_daemon_is_told_as_that(error, output, free):
    found = failed(error, output, free)
    assert isinstance(found, MachineError)
    assert "the disk of the docker daemon is full" in found.what


def test_environment_that_is_not_the_lock_is_refused():
    found = failed(RAN[0], "the environment is not what was locked\na: locked 1, installed not")
    assert isinstance(found, CheckRefusedError)
    assert found.why == "a: locked 1, installed not"


def test_what_nobody_knows_is_told_in_the_daemons_words():
    found = failed("dockerfile parse error line 3: unknown instruction: FORM")
    assert isinstance(found, BuildError)
    assert "unknown instruction" in found.why


def test_socket_that_is_not_there_and_one_that_nobody_listens_on(tmp_path):
    with pytest.raises(MachineError, match="no docker daemon answers") as caught:
        open_engine({"DOCKER_HOST": f"unix://{tmp_path}/none"})
    assert f"there is no socket {tmp_path}/none" in caught.value.why
    assert caught.value.fix.endswith("Without a daemon: --builder native.")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    with pytest.raises(MachineError, match="no docker daemon answers") as caught:
        open_engine({"DOCKER_HOST": f"unix://{tmp_path}/dead"})
    assert caught.value.why == os.strerror(errno.ECONNREFUSED)


def test_socket_of_others_says_who_may_use_it(tmp_path):
    path = tmp_path / "socket"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and os.geteuid() == 0:
            folder.chmod(folder.stat().st_mode | 0o111)

    def attempt():
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        with pytest.raises(MachineError, match="no permission to use the docker daemon"):
            open_engine({"DOCKER_HOST": f"unix://{path}"})

    assert in_child(attempt) == 0


@pytest.mark.parametrize(
    "environ", [{"DOCKER_CONTEXT": "nowhere"}, {"DOCKER_HOST": "ftp://x"}, {"DOCKER_HOST": "tcp://127.0.0.1:1"}]
)
def test_settings_that_lead_nowhere_are_named(environ, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        open_engine(environ)
    assert "--builder native" in caught.value.fix or "DOCKER_HOST" in caught.value.fix
