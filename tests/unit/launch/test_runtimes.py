"""Choosing a runtime: the best that works, the one that was named, or an error with what helps."""

import os
from pathlib import Path

import pytest

from envbuild.core import sandbox
from envbuild.core.errors import MachineError
from envbuild.launch import runtimes
from envbuild.launch.runtimes import probe
from envbuild.store import local

WORKS = ["/bin/true"]


def opener(*words):
    """A way to open: words before the command; `true` ignores what follows."""
    return lambda: lambda sqsh, place: list(words)


def absent():
    raise MachineError("the program squashfuse is not installed", fix="Install it: apt-get install squashfuse")


@pytest.fixture(autouse=True)
def _machine(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "probe", lambda: Path("/usr/bin/bwrap"))
    monkeypatch.setattr(local.tempfile, "gettempdir", lambda: str(tmp_path))


def machine_with(monkeypatch, **ways):
    monkeypatch.setattr(runtimes, "RUNTIMES", ways)


def test_probe_takes_the_first_that_works_and_leaves_nothing_behind(monkeypatch, tmp_path):
    machine_with(monkeypatch, loop=opener("/bin/false"), squashfuse=opener("/bin/true"), unpack=lambda: None)
    assert probe().name == "squashfuse"
    assert list((tmp_path / f"envbuild-{os.geteuid()}" / "staging").iterdir()) == []


def test_probe_takes_the_one_that_was_named(monkeypatch):
    machine_with(monkeypatch, loop=opener("/bin/true"), squashfuse=opener("/bin/true"), unpack=lambda: None)
    assert [probe(name).name for name in ("loop", "squashfuse", "unpack")] == ["loop", "squashfuse", "unpack"]


def test_probe_does_not_replace_the_one_that_was_named(monkeypatch):
    machine_with(monkeypatch, loop=opener("/bin/true"), squashfuse=absent, unpack=lambda: None)
    with pytest.raises(MachineError, match="runtime squashfuse does not work") as caught:
        probe("squashfuse")
    assert "apt-get install squashfuse" in caught.value.why


def test_probe_error_has_the_reason_of_each_runtime(monkeypatch):
    machine_with(monkeypatch, loop=opener("/bin/sh", "-c", "echo no loop device; exit 32"), squashfuse=absent)
    with pytest.raises(MachineError, match="no way to open") as caught:
        probe()
    assert "loop: mounting an empty .sqsh fails: no loop device" in caught.value.why
    assert "squashfuse: the program squashfuse is not installed" in caught.value.why
