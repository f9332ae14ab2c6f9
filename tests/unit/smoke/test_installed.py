"""Files of installed packages, and libraries that exist twice: real files, really damaged."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild_smoke.environment import installed, libraries, machine
from envbuild_smoke.results import Image

Files = dict[str, bytes]
TORCH: Files = {
    "torch/__init__.py": b"version = 1\n",
    "torch/lib/libtorch_cpu.so": b"a library",
    "torch/data.bin": b"data",
    "torch/__pycache__/x.pyc": b"bytecode",
    "../../../bin/torchrun": b"#!python",
}


def install(folder: Path, name: str, files: Files, version: str = "1.0", requires: str = "") -> None:
    """Install a package as a wheel's installer does: files, and a RECORD of them."""
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    metadata = f"{name}-{version}.dist-info"
    everything = {
        **files,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirement}".encode(),
    }
    rows = []
    for path, content in everything.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    (folder / metadata / "RECORD").write_text("".join(rows) + f"{metadata}/RECORD,,\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, the only one on the path."""
    folder = tmp_path / "lib" / "python3" / "site-packages"
    install(folder, "torch", TORCH)
    install(folder, "Single_File", {"single.py": b"x = 1\n"}, "2.0")
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def findings() -> list[tuple[str | None, str | None, str | None]]:
    files = installed.recorded(["torch", "single-file", "absent"])
    listed = installed.file_findings(files) + installed.shadowed(files)
    return [(finding.code, finding.package, finding.found) for finding in listed]


def test_nothing_is_found_where_all_is_as_recorded(packages: Path) -> None:
    assert findings() == []
    assert len(installed.recorded(["torch", "single-file"])["torch"]) == 7


@pytest.mark.parametrize(
    ("requires", "content", "expected"),
    [
        ("", b"base", []),
        ("", b"over", []),
        ("", b"else", ["dsl-base"]),
        # What requires the other is meant to lie over it.
        ("dsl_base>=4", b"over", []),
        ("dsl_base>=4", b"base", ["dsl-over"]),
    ],
)
def test_file_of_several_packages(packages: Path, requires: str, content: bytes, expected: list[str]) -> None:
    install(packages, "dsl_base", {"dsl/core.so": b"base"})
    install(packages, "dsl_over", {"dsl/core.so": b"over"}, requires=requires)
    (packages / "dsl/core.so").write_bytes(content)

    findings = installed.file_findings(installed.recorded(["dsl-base", "dsl-over"]))

    assert [finding.package for finding in findings] == expected


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("torch/lib/libtorch_cpu.so", None, ""),
        ("torch/__init__.py", TORCH["torch/__init__.py"][::-1], ": sha256="),
        ("torch/lib/libtorch_cpu.so", TORCH["torch/lib/libtorch_cpu.so"][::-1], ": sha256="),
        # What is no source or library is known by its size.
        ("torch/data.bin", b"more data", ": 9 bytes"),
    ],
)
def test_file_that_is_gone_or_differs(packages: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is None:
        (packages / name).unlink()
        assert findings() == [("file-missing", "torch", None)]
    else:
        (packages / name).write_bytes(content)
        ((code, package, text),) = findings()
        assert (code, package) == ("file-differs", "torch")
        assert str(text).startswith(f"{packages / name}{problem}")


def test_large_library_is_known_by_its_size_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "HASHED_BYTES", 5)
    (packages / "torch" / "lib" / "libtorch_cpu.so").write_bytes(b"yrarbil a")
    assert findings() == []


def test_files_written_by_installers_are_not_compared(packages: Path) -> None:
    (packages / "torch" / "__pycache__" / "x.pyc").unlink()
    (packages / "../../../bin/torchrun").write_bytes(b"#!/the/interpreter")
    (packages / "torch-1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0\nInstaller: other\n")
    assert findings() == []


def test_findings_of_one_kind_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "torch", {f"torch/{number}.py": b"" for number in range(20)})
    for number in range(20):
        (tmp_path / "torch" / f"{number}.py").unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    listed = findings()
    assert len(listed) == 6
    assert listed[-1] == ("file-missing", "torch", "15 more of its files")


@pytest.mark.parametrize("module", ["torch/__init__.py", "single.py"])
def test_module_that_is_found_earlier_on_the_path(packages: Path, tmp_path: Path, module: str) -> None:
    front = tmp_path / "front"
    (front / module).parent.mkdir(parents=True)
    (front / module).write_text("shadow = True\n")
    sys.path.insert(0, str(front))
    package = "torch" if "torch" in module else "single-file"
    assert findings() == [("shadowed", package, str(front / module))]


CORE: Files = {"megatron/core/__init__.py": b"", "megatron/core/models/__init__.py": b"", "megatron/data.txt": b""}


def test_module_of_a_namespace_that_is_found_earlier_on_the_path(packages: Path, tmp_path: Path) -> None:
    """PYTHONPATH=/opt/Megatron-LM: `megatron` itself has no file that could tell."""
    install(packages, "megatron_core", CORE)
    files = installed.recorded(["megatron-core"])
    assert installed.shadowed(files) == []
    other = tmp_path / "Megatron-LM" / "megatron" / "core" / "__init__.py"
    (tmp_path / "Megatron-LM" / "megatron" / "training").mkdir(parents=True)
    sys.path.insert(0, str(tmp_path / "Megatron-LM"))
    assert installed.shadowed(files) == []
    other.parent.mkdir()
    other.write_text("")
    expected = f"{packages}/megatron/core/__init__.py"
    assert [(finding.expected, finding.found) for finding in installed.shadowed(files)] == [(expected, str(other))]
    # As a package of its own it stands for all that is below it.
    (tmp_path / "Megatron-LM" / "megatron" / "__init__.py").write_text("")
    assert [finding.found for finding in installed.shadowed(files)] == [str(other)]


def test_module_of_a_namespace_in_a_namespace_that_is_found_earlier_on_the_path(packages: Path, tmp_path: Path) -> None:
    """nv-one-logger: nv_one_logger/training_telemetry/api."""
    install(packages, "one_logger", {"one_logger/telemetry/api/__init__.py": b""})
    files = installed.recorded(["one-logger"])
    assert installed.shadowed(files) == []
    other = tmp_path / "front" / "one_logger" / "telemetry" / "api" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("")
    sys.path.insert(0, str(tmp_path / "front"))
    assert [finding.found for finding in installed.shadowed(files)] == [str(other)]


def test_module_that_was_imported_from_elsewhere(packages: Path, tmp_path: Path) -> None:
    files = installed.recorded(["torch"])
    own, other = packages / "torch" / "__init__.py", tmp_path / "torch.py"
    assert installed.shadowed(files, imported={"torch": str(own), "unknown": str(other)}) == []
    (finding,) = installed.shadowed(files, imported={"torch": str(other)})
    assert (finding.code, finding.package, finding.found) == ("shadowed", "torch", str(other))


def test_library_that_is_loaded_twice(packages: Path, tmp_path: Path) -> None:
    own, other = packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2", tmp_path / "other" / "libnccl.so.2.27.3"
    for path in (own, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"nccl")
    # A link to a file is that file.
    link = tmp_path / "libnccl.so.2"
    link.symlink_to(own)
    known = libraries.packaged([str(packages)])
    assert known["libnccl.so.2"] == [str(own)]

    def twice(*loaded: Path) -> list[str]:
        return libraries.twice(known, {"libnccl.so.2": tuple(map(str, loaded))}).get("libnccl.so.2", [])

    # The other one lies on the machine, and nothing has loaded it.
    assert libraries.twice(known, {}) == {}
    assert twice(own) == twice(link) == []
    assert twice(own, other) == twice(other) == sorted([str(own), str(other)])
    # A base may bring what no package has.
    assert libraries.twice({}, {"libnccl.so.2": (str(other),)}) == {}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/x/libnccl.so.2.29.7", "libnccl.so.2"),
        ("/x/libcudnn.so.9", "libcudnn.so.9"),
        ("/x/torch/lib/libtorch_cpu.so", "libtorch_cpu.so"),
        ("/x/libcudart.so.13", None),
        ("/x/libtorch_global_deps.so", None),
        ("/x/libncclfoo.so.2", None),
        ("/x/libnccl.so.2.old", None),
    ],
)
def test_names_of_libraries(file: str, name: str | None) -> None:
    assert libraries.soname(file) == name


def test_mapped_libraries_are_read_from_the_process(tmp_path: Path) -> None:
    """A real process that loads a copy of a real library under such a name."""
    ffi = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    copy = tmp_path / "libc10.so"
    copy.write_bytes(Path(ffi).read_bytes())
    code = (
        "import json, mmap; from envbuild_smoke.environment.libraries import mapped;"
        f"file = open({str(copy)!r}, 'rb'); mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ);"
        "print(json.dumps(mapped()))"
    )
    smoke = str(Path(libraries.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": smoke}, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {"libc10.so": [str(copy)]}


def test_image_is_hashed_and_its_fingerprint_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"squashed" * 300_000)
    monkeypatch.setattr(machine, "FINGERPRINT", tmp_path / "fingerprint.json")
    expected = {"file_digest": f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}", "file_bytes": 2_400_000}
    assert machine.image(image) == Image(**expected, fingerprint=None)
    machine.FINGERPRINT.write_text('{"schema": "envbuild.fingerprint/1"}')
    assert machine.image(image).fingerprint == {"schema": "envbuild.fingerprint/1"}


def test_machine_names_what_changes_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    for name, value in (("LD_PRELOAD", "/x/libfast.so"), ("LD_LIBRARY_PATH", "/x/lib"), ("PYTHONPATH", "/x/apex")):
        monkeypatch.setenv(name, value)
    described = machine.describe((), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"cuda": "13.0", "nccl": None})
    assert described.variables["NCCL_P2P_DISABLE"] == "1"
    assert described.variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "SECRET_TOKEN" not in described.variables
    loaded = {"LD_PRELOAD": "/x/libfast.so", "LD_LIBRARY_PATH": "/x/lib", "PYTHONPATH": "/x/apex"}
    assert {name: described.variables.get(name) for name in loaded} == loaded
    assert described.memory_bytes > 1 << 28
    assert (described.cuda, described.gpus, described.topology) == ("13.0", (), None)
