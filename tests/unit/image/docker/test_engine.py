"""Which daemon is used, and what its failures are."""

import contextlib
import errno
import os
import socket

import pytest
from docker.errors import APIError, ImageNotFound
from helpers.errors import error_of
from helpers.processes import NOBODY, in_child
from requests.exceptions import ConnectionError as LostConnectionError

from envbuild.core.errors import MachineError
from envbuild.image.docker.engine import Engine, open_engine

OTHERWISE = "--format oci"


class Api:
    """The SDK's client of a daemon that fails in one way."""

    timeout = 60

    def __init__(self, error=None, messages=()):
        self.error = error
        self.messages = messages

    def version(self):
        return {"Version": "28.2.2", "Components": [{"Name": "Engine"}]}

    def inspect_image(self, _):
        raise self.error

    def load_image(self, archive):
        assert self.timeout is None
        b"".join(archive)
        yield from self.messages


def refused(environ):
    return error_of(MachineError, open_engine, environ, otherwise=OTHERWISE)


def test_socket_that_is_missing_and_one_without_a_listener(tmp_path):
    error = refused({"DOCKER_HOST": f"unix://{tmp_path}/none"})
    assert error.what.startswith("no docker daemon answers at unix://")
    assert f"there is no socket {tmp_path}/none" in error.why
    assert error.fix.endswith("Without a daemon: --format oci.")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "dead"))
        assert refused({"DOCKER_HOST": f"unix://{tmp_path}/dead"}).why == os.strerror(errno.ECONNREFUSED)


def test_socket_of_another_group_names_that_group(tmp_path):
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
        assert "usermod -aG docker" in refused({"DOCKER_HOST": f"unix://{path}"}).fix

    with contextlib.closing(server):
        assert in_child(attempt) == 0


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DOCKER_CONTEXT": "nowhere"}, "there is no docker context nowhere"),
        ({"DOCKER_HOST": "ftp://x"}, "no docker daemon answers at ftp://x"),
        ({"DOCKER_HOST": "tcp://127.0.0.1:1"}, "no docker daemon answers at"),
        (
            {"DOCKER_HOST": "tcp://127.0.0.1:1", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/nowhere"},
            "docker's settings cannot be used",
        ),
    ],
)
def test_settings_without_a_daemon_are_named(environ, words, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    error = refused(environ)
    assert words in error.what
    assert "DOCKER_HOST" in error.fix


@pytest.mark.parametrize(
    ("error", "what", "words"),
    [
        (APIError("x", explanation="a: no space left on device"), "the disk of the docker daemon is full", ""),
        (APIError("x", explanation="token=abc refused"), "the docker daemon cannot look for image a", OTHERWISE),
        (LostConnectionError("reset"), "the docker daemon at unix:///s went away: it did not look for image a", ""),
    ],
)
def test_failure_of_a_request_is_an_error_with_help(error, what, words):
    with pytest.raises(MachineError) as caught:
        Engine(Api(error), "unix:///s", OTHERWISE).find("a")
    assert caught.value.what == what
    assert words in caught.value.fix


def test_image_that_is_missing_has_no_id():
    assert Engine(Api(ImageNotFound("x")), "unix:///s", OTHERWISE).find("a") is None


def test_load_has_no_time_limit_and_returns_the_last_error():
    api = Api(messages=({"stream": "Loading"}, {"error": "first"}, {"error": "last"}))
    assert Engine(api, "unix:///s", OTHERWISE).load([b"a"]) == "last"
    assert api.timeout == 60
    assert Engine(Api(), "unix:///s", OTHERWISE).load([b"a"]) == ""
