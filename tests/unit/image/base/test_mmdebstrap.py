"""Bases: what is scrubbed, who owns what, which packages are there, and what failures are called."""

import re
import tarfile

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.core.errors import BuildError, MachineError, NetworkError
from envbuild.core.process import Finished
from envbuild.image.base import base_key, mmdebstrap
from envbuild.image.base.mmdebstrap import Making, failure, mmdebstrap_version, scrub, scrub_patterns, with_rights
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
