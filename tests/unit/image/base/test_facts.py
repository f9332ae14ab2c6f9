"""A base's file, compared with root file systems that differ from it."""

import pytest
from helpers.errors import error_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.image.base import facts
from envbuild.image.base.facts import check, inside, packages_of, require_machine

BASE = Catalog.open(data_root()).base("debian12")
LIBC = (
    b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + b"GNU C Library (Debian GLIBC 2.36-9) stable version 2.36.\n"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root file system as Debian's: os-release is a link, the C library in a folder of the machine's."""
    monkeypatch.setattr(facts, "_differing_python", lambda *_: iter(()))
    for folder in ("etc", "usr/lib/x86_64-linux-gnu", "usr/bin", "var/lib/dpkg"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    root = tmp_path / "root"
    (root / "lib").symlink_to("usr/lib")
    (root / "usr/lib/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    (root / "usr/lib/x86_64-linux-gnu/libc.so.6").write_bytes(LIBC)
    (root / "usr/bin/python3.11").write_text("#!/bin/true\n")
    (root / "usr/bin/python3.11").chmod(0o755)
    (root / "var/lib/dpkg/status").write_text("Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n")
    return root


def test_base_that_matches_its_file_passes(root):
    check(BASE, "debian12", root, {})
    assert packages_of(root) == {"libc6": "2.36-9"}


def write(name, data):
    def change(root):
        (root / name).unlink()
        (root / name).write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write("usr/lib/os-release", b"ID=ubuntu\nVERSION_ID=24.04\n"), "debian 12 in the file, ubuntu 24.04"),
        (lambda root: (root / "etc/os-release").unlink(), "no /etc/os-release"),
        (write("usr/lib/x86_64-linux-gnu/libc.so.6", LIBC.replace(b"2.36.", b"2.31.")), "2.36 in the file, 2.31"),
        (
            write("usr/lib/x86_64-linux-gnu/libc.so.6", LIBC.replace(b"\x3e\x00", b"\xb7\x00")),
            "linux/amd64 in the file, aarch64",
        ),
        (lambda root: (root / "usr/lib/x86_64-linux-gnu/libc.so.6").unlink(), "no C library"),
        (lambda root: (root / "usr/bin/python3.11").unlink(), "no program /usr/bin/python3.11"),
        (lambda root: (root / "usr/bin/python3.11").chmod(0o644), "no program /usr/bin/python3.11"),
    ],
)
def test_base_that_differs_from_its_file_is_refused(root, change, message):
    change(root)
    error = error_of(CheckRefusedError, check, BASE, "debian12", root, {})
    assert message in error.why
    assert "envs/bases/debian12.toml" in error.fix


def test_toolkit_of_another_cuda_is_refused(root):
    gpu = BASE.model_copy(update={"cuda": "13.0"})
    check(gpu, "it", root, {"CUDA_VERSION": "13.0.2"})
    error = error_of(CheckRefusedError, check, gpu, "it", root, {"CUDA_VERSION": "12.8.1"})
    assert "13.0 in the file, 12.8 in the base" in error.why


def test_links_are_followed_inside_the_root_only(root, tmp_path):
    (tmp_path / "outside").write_text("x")
    (root / "out").symlink_to("../outside")
    (root / "absolute").symlink_to("/usr/lib/os-release")
    (root / "loop").symlink_to("loop")
    assert inside(root, "out") is None
    assert inside(root, "/absolute") == root / "usr/lib/os-release"
    assert inside(root, "loop") is None
    assert inside(root, "../../../usr/bin") == root / "usr/bin"


@pytest.mark.parametrize(("found", "same"), [("2.9.0a0+50eac811a6.nv25.09", True), ("2.9.0", False), (None, False)])
def test_versions_are_compared_as_versions(found, same):
    assert facts._same_version(found, "2.9.0a0+50eac811a6.nv25.9") is same


def test_base_for_another_processor_is_refused_unless_it_is_emulated(tmp_path, monkeypatch):
    arm = BASE.model_copy(update={"platform": "linux/arm64"})
    monkeypatch.setattr(facts.machine, "machine", lambda: "x86_64")
    require_machine(BASE, "it", tmp_path)
    error = error_of(MachineError, require_machine, arm, "it", tmp_path)
    assert "linux/arm64" in error.what
    assert "qemu-user-static" in error.fix
    (tmp_path / "qemu-aarch64").write_text("enabled\ninterpreter /usr/bin/qemu-aarch64-static\nflags: OC\n")
    with pytest.raises(MachineError):
        require_machine(arm, "it", tmp_path)
    (tmp_path / "qemu-aarch64").write_text("enabled\ninterpreter /usr/bin/qemu-aarch64-static\nflags: OCF\n")
    require_machine(arm, "it", tmp_path)
