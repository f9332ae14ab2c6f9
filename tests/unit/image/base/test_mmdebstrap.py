"""Bases: what is scrubbed, who owns what, which packages are there, and what failures are called."""

import os
import pwd
import re
import tarfile
from pathlib import Path

import pytest
from helpers.image_inputs import inputs_of, small_lock
from helpers.sites import context_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.core.errors import BuildError, MachineError, NetworkError
from envbuild.core.process import Finished
from envbuild.image import build
from envbuild.image.base import base, base_key, mmdebstrap
from envbuild.image.base.mmdebstrap import Making, failure, mmdebstrap_version, scrub, scrub_patterns, with_rights
from envbuild.image.build import BaseChoice
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.single_layer import members_of

BASE = Catalog.open(data_root()).base("debian12")


def put(root, *names):
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_scrub_removes_the_builders_traces_and_keeps_the_distributions_files(tmp_path):
    root = tmp_path / "root"
    put(
        root,
        "etc/apt/sources.list",
        "etc/apt/sources.list.d/0000machine.list",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
        "etc/hostname",
        "etc/resolv.conf",
        "etc/machine-id",
        "dev/null",
        "var/lib/apt/lists/m_dists_bookworm_InRelease",
        "var/lib/apt/lists/partial/x",
        "var/cache/apt/archives/python.deb",
        "var/cache/ldconfig/aux-cache",
        "var/cache/debconf/config.dat-old",
        "var/lib/dpkg/status-old",
        "var/log/dpkg.log",
        "var/log/apt/term.log",
        "tmp/left",
        "var/tmp/left",
    )
    kept = [
        "etc/apt/apt.conf.d/01autoremove",
        "etc/apt/trusted.gpg.d/debian.asc",
        "etc/debian_version",
        "var/cache/debconf/config.dat",
        "var/lib/apt/extended_states",
        "var/lib/dpkg/status",
    ]
    put(root, *kept)
    scrub(root, scrub_patterns())
    assert left(root) == sorted(kept)
    assert (root / "dev").is_dir()
    assert (root / "var/log").is_dir()


def test_scrub_never_follows_a_link_out_of_the_root(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside, "precious", "log/precious")
    (root / "var").mkdir(parents=True)
    (root / "var/log").symlink_to(outside / "log")
    (root / "tmp").mkdir()
    (root / "tmp/link").symlink_to(outside)
    scrub(root, scrub_patterns())
    assert left(outside) == ["log/precious", "precious"]
    assert not (root / "tmp/link").is_symlink()


def test_version_is_the_same_where_the_locale_is_not_installed(monkeypatch):
    """As over ssh, which hands the variables on: perl warns of it, and that is no part of what makes a base."""
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    version = mmdebstrap_version.__wrapped__()
    assert re.fullmatch(r"mmdebstrap [0-9.]+\S*", version)


def test_rights_are_those_of_the_archive(tmp_path):
    rights = {"etc/passwd": (0o644, 0, 0), "etc/shadow": (0o640, 0, 42), "usr/bin/su": (0o4755, 0, 0)}
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, (mode, uid, gid) in rights.items():
            member = tarfile.TarInfo(f"./{name}")
            member.mode, member.uid, member.gid = mode, uid, gid
            tar.addfile(member)
    noted = {}
    for _ in with_rights(members_of(LayerBlob(file=tmp_path / "x.tar")), noted):
        pass
    assert noted == rights


def test_key_changes_with_definition_tool_and_scrubbing(monkeypatch):
    monkeypatch.setattr(mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.3.5")
    key = base_key(BASE)
    assert base_key(BASE) == key
    smaller = BASE.model_copy(update={"obtain": BASE.obtain.model_copy(update={"packages": ()})})
    keys = {key, base_key(smaller)}
    monkeypatch.setattr(mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.5.7")
    keys.add(base_key(BASE))
    monkeypatch.setattr(mmdebstrap, "scrub_patterns", lambda: ("tmp/*",))
    keys.add(base_key(BASE))
    assert len(keys) == 4


def finished(output):
    return Finished(status=25, output=output, seconds=1.0)


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (
            "W: Failed to fetch http://m/dists/InRelease  Temporary failure resolving 'm'\nI: removing tempdir\n",
            NetworkError,
            "Temporary failure resolving",
        ),
        (
            "W: GPG error: http://m bookworm InRelease: NO_PUBKEY 6ED0E7B82643E131\nE: Failed to fetch http://m/\n",
            BuildError,
            "NO_PUBKEY",
        ),
        ("E: Unable to locate package python9.9\nI: removing tempdir\n", BuildError, "python9.9"),
        ("something unknown\n", BuildError, "something unknown"),
        ("dpkg: error: failed to write: No space left on device\nE: apt-get failed\n", MachineError, "space"),
    ],
)
def test_failure_of_mmdebstrap_is_named_by_its_cause(tmp_path, output, kind, message):
    error = failure(finished(output), "debian12", BASE, Making(tmp_path / "rootfs.tar", tmp_path, tmp_path / "log"))
    assert type(error) is kind
    assert message in error.why
    assert error.fix
    assert ("apt-get install debian-archive-keyring" in error.fix) is (message == "NO_PUBKEY")


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
