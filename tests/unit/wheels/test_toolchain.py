"""Toolkits and compilers of a machine: small programs that answer as nvcc and g++ do."""

from pathlib import Path

import pytest

from envbuild.core.errors import MachineError
from envbuild.wheels import toolchain
from envbuild.wheels.toolchain import find_toolchain


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, version: str) -> Path:
    release = version.rpartition(".")[0]
    program(
        home / "bin/nvcc",
        f'[ "$1" = --dryrun ] && echo "#$ TOP={home}" || echo "Cuda compilation tools, release {release}, V{version}"',
    )
    return home


@pytest.fixture
def machine(tmp_path, monkeypatch) -> dict[str, str]:
    """An environment with a host compiler and nothing else."""
    monkeypatch.setattr(toolchain, "USUAL_HOME", tmp_path / "usual")
    for name in ("gcc", "g++"):
        program(tmp_path / "bin" / name, "echo 12.2.0")
    return {"PATH": str(tmp_path / "bin")}


def test_the_toolkit_whose_version_fits_is_taken(machine, tmp_path):
    old, new = toolkit(tmp_path / "old", "12.6.77"), toolkit(tmp_path / "new", "13.0.88")
    found = find_toolchain("13.0", {**machine, "CUDA_HOME": str(old), "CUDA_PATH": str(new)})
    assert (found.home, found.cuda, found.host) == (new, "13.0.88", "g++ 12.2.0")
    assert (found.nvcc, found.cc, found.cxx) == (new / "bin/nvcc", tmp_path / "bin/gcc", tmp_path / "bin/g++")


def test_the_nvcc_on_path_may_be_a_script_that_calls_the_real_one(machine, tmp_path):
    home = toolkit(tmp_path / "cuda-13.0", "13.0.88")
    program(tmp_path / "bin/nvcc", f'exec {home}/bin/nvcc "$@"')
    assert find_toolchain("13.0", machine).home == home


def test_the_usual_place_is_looked_at(machine, tmp_path):
    assert find_toolchain("13.0", {**machine, "X": str(toolkit(tmp_path / "usual", "13.0.1"))}).cuda == "13.0.1"


def test_a_toolkit_of_another_version_is_refused(machine, tmp_path):
    home = toolkit(tmp_path / "old", "13.1.10")
    with pytest.raises(MachineError, match=r"no CUDA toolkit 13\.0") as refused:
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(home)})
    assert f"CUDA_HOME: {home}: CUDA 13.1.10" in refused.value.why
    assert "CUDA_HOME" in refused.value.fix
    assert "nvidia-cuda-nvcc" in refused.value.fix


def test_no_toolkit_at_all(machine):
    with pytest.raises(MachineError) as refused:
        find_toolchain("13.0", machine)
    assert "no toolkit at all" in refused.value.why


def test_an_nvcc_that_does_not_run_is_named(machine, tmp_path):
    program(tmp_path / "cuda/bin/nvcc", "exit 1")
    with pytest.raises(MachineError) as refused:
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(tmp_path / "cuda")})
    assert "no nvcc that runs" in refused.value.why


def test_no_host_compiler(machine, tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    with pytest.raises(MachineError, match="compiler clang\\+\\+ is not") as refused:
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(home), "CXX": "clang++"})
    assert "apt-get install" in refused.value.fix
