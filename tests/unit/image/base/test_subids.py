"""An account without subordinate IDs gets the command for them before mmdebstrap begins."""

import os
import pwd
from pathlib import Path

import pytest
from helpers.image_inputs import inputs_of, small_lock
from helpers.sites import context_of

from envbuild.core.errors import MachineError
from envbuild.image import build
from envbuild.image.base import base, mmdebstrap
from envbuild.image.build import BaseChoice

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def etc(tmp_path, monkeypatch) -> Path:
    """Programs that are there, and an /etc of its own."""
    for name in ("newuidmap", "newgidmap"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def write(etc: Path, subuid: str | None, subgid: str | None) -> None:
    for name, text in (("subuid", subuid), ("subgid", subgid)):
        if text is not None:
            (etc / name).write_text(text)


@pytest.mark.parametrize("text", [f"{ME}:100000:65536\n", f"other:1:2\n# note\n\n{ME}:5:6"])
def test_account_with_ranges(etc, text):
    write(etc, text, text)
    mmdebstrap.require_subids(etc)
    (etc / "subgid").unlink()
    with pytest.raises(MachineError, match="has no subordinate IDs"):
        mmdebstrap.require_subids(etc)


@pytest.mark.parametrize(
    ("subuid", "subgid", "missing", "command"),
    [
        (None, None, "{etc}/subuid and {etc}/subgid",
         "usermod --add-subuids 100000-165535 --add-subgids 100000-165535"),
        ("", f"{ME}:1:1", "{etc}/subuid.", "usermod --add-subuids 100000-165535"),
        ("a:100000:65536\nb:165536:65536\n", f"{ME}:1:1", "{etc}/subuid.", "usermod --add-subuids 231072-296607"),
        (f"{ME}:1:1", f"{os.getuid()}:100000:65536", "{etc}/subgid.", "usermod --add-subgids 165536-231071"),
        (f"{ME}:1:1", f"{ME}:one:two\n{ME}\nx{ME}:1:2", "{etc}/subgid.", "usermod --add-subgids 100000-165535"),
    ],
)  # fmt: skip
def test_account_without_ranges_gets_the_command(etc, subuid, subgid, missing, command):
    write(etc, subuid, subgid)
    with pytest.raises(MachineError, match="has no subordinate IDs") as caught:
        mmdebstrap.require_subids(etc)
    assert missing.format(etc=etc) in caught.value.why
    assert f"As root: {command} {ME}\n" in caught.value.fix


def test_account_without_a_name(etc, monkeypatch):
    def unknown(_):
        raise KeyError

    monkeypatch.setattr(mmdebstrap.pwd, "getpwuid", unknown)
    with pytest.raises(MachineError, match="has no name"):
        mmdebstrap.require_subids(etc)


def test_machine_without_the_programs_names_the_package(etc, monkeypatch):
    write(etc, f"{ME}:1:1", f"{ME}:1:1")
    (etc / "newgidmap").unlink()
    monkeypatch.setenv("PATH", str(etc))
    with pytest.raises(MachineError, match="newgidmap is not installed") as caught:
        mmdebstrap.require_subids(etc)
    assert "uidmap" in caught.value.fix


@pytest.mark.parametrize(("base_is_there", "refresh"), [(False, False), (True, True), (True, False)])
def test_subordinate_ids_are_required_only_before_a_base_is_made(tmp_path, monkeypatch, base_is_there, refresh):
    """Whatever comes after is not of this test: the first error ends it."""

    def fail(text):
        raise MachineError(text)

    monkeypatch.setattr(base.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mmdebstrap, "require_subids", lambda: fail("asked for IDs"))
    monkeypatch.setattr(build, "check_inputs", lambda *_: None)
    monkeypatch.setattr(build, "find_mksquashfs", lambda: None)
    monkeypatch.setattr(base.mmdebstrap, "require_tools", lambda: None)
    monkeypatch.setattr(base.sandbox, "probe", lambda: None)
    monkeypatch.setattr(build, "_find", lambda *_: None)
    monkeypatch.setattr(build, "find_base", lambda *_: object() if base_is_there else None)
    monkeypatch.setattr(build, "make_base", lambda *_, **__: fail("made the base"))
    inputs = inputs_of(small_lock(tmp_path / "lock"))
    monkeypatch.setattr(build, "locked_torch", lambda *_: None)
    expected = "made the base" if base_is_there and not refresh else "asked for IDs"
    with pytest.raises(MachineError, match=expected):
        build.build_image(inputs, context_of(tmp_path), BaseChoice.ANEW if refresh else BaseChoice.USUAL)
