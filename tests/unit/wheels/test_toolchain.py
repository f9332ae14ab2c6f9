"""Toolkits and compilers of a machine: small programs that answer as nvcc and g++ do."""

from pathlib import Path

import pytest

from envbuild.core.errors import MachineError
from envbuild.wheels.toolchain import toolchain
from envbuild.wheels.toolchain.host_compiler import RULES as RULES_PLACES
from envbuild.wheels.toolchain.toolchain import find_toolchain


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


# Of nvcc 13.0's include/crt/host_config.h, the conditions in its words.
RULES = """\
#if defined(__GNUC__)
#if __GNUC__ > 15
#error -- unsupported GNU version! gcc versions later than 15 are not supported!
#endif
#if (__clang_major__ >= 21) || (__clang_major__ < 3)
#error -- unsupported clang version! clang version must be less than 21 and greater than 3.2 .
"""


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


def test_a_toolkit_of_another_version_is_refused(machine, tmp_path):
    home = toolkit(tmp_path / "old", "13.1.10")
    program(tmp_path / "broken/bin/nvcc", "exit 1")
    with pytest.raises(MachineError, match=r"no CUDA toolkit 13\.0") as refused:
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(home), "CUDA_PATH": str(tmp_path / "broken")})
    assert f"CUDA_HOME: {home}: CUDA 13.1.10" in refused.value.why
    assert "no nvcc that runs" in refused.value.why
    assert "CUDA_HOME" in refused.value.fix
    assert "--toolkit index" in refused.value.fix


def test_the_toolkit_of_a_base_image_is_the_machines_own(machine, tmp_path):
    """As NVIDIA's images have it: /usr/local/cuda is a link to the version, its headers and libraries are links too."""
    home = toolkit(tmp_path / "cuda-13.0", "13.0.88")
    (home / "targets/x86_64-linux/include/crt").mkdir(parents=True)
    (home / "targets/x86_64-linux/include/crt/host_config.h").write_text(RULES)
    (home / "include").symlink_to("targets/x86_64-linux/include")
    (tmp_path / "usual").symlink_to("cuda-13.0")
    for environ in ({}, {"CUDA_HOME": str(tmp_path / "usual")}, {"PATH": f"{machine['PATH']}:{tmp_path}/usual/bin"}):
        found = find_toolchain("13.0", machine | environ)
        assert (found.home.resolve(), found.source, found.packages) == (home, "system", {})


def test_no_host_compiler(machine, tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    with pytest.raises(MachineError, match="compiler clang\\+\\+ is not") as refused:
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(home), "CXX": "clang++"})
    assert "apt-get install" in refused.value.fix


@pytest.mark.parametrize("message", ["", "usage: true [ignored]", "12.2.0 and more"])
def test_program_without_a_version_is_refused_as_compiler(machine, tmp_path, message):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    odd = program(tmp_path / "odd", f"echo {message!r}")
    with pytest.raises(MachineError, match="cannot be used as a compiler"):
        find_toolchain("13.0", {**machine, "CUDA_HOME": str(home), "CC": str(odd)})


def compiler(path: Path, macros: dict[str, int]) -> Path:
    """A compiler that says so of itself."""
    lines = "\n".join(f"#define {name} {value}" for name, value in macros.items())
    return program(path, f'case "$1" in -dM) cat <<END\n{lines}\nEND\n;; *) echo 99.1.0;; esac')


GCC_15, GCC_16 = {"__GNUC__": 15}, {"__GNUC__": 16}
CLANG_20, CLANG_21 = ({"__GNUC__": 4, "__clang_major__": version} for version in (20, 21))


@pytest.mark.parametrize("place", RULES_PLACES)
@pytest.mark.parametrize(
    ("macros", "newest", "way_out"),
    [
        (GCC_15, None, ""),
        (GCC_16, 15, "apt-get install g++-15, and name it: CC=gcc-15 CXX=g++-15"),
        (CLANG_20, None, ""),
        (CLANG_21, 20, "apt-get install clang-20, and name it: CC=clang-20 CXX=clang++-20"),
        ({}, None, ""),
    ],
)
def test_a_host_compiler_that_is_too_new_is_refused_before_anything_is_built(
    machine, tmp_path, place, macros, newest, way_out
):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    rules = home / place.replace("*", "x86_64-linux")
    rules.parent.mkdir(parents=True)
    rules.write_text(RULES)
    environ = {**machine, "CUDA_HOME": str(home), "CXX": str(compiler(tmp_path / "bin/c++", macros))}
    if newest is None:
        assert find_toolchain("13.0", environ).host.endswith(", c++ 99.1.0")
        return
    with pytest.raises(MachineError, match=r"the host compiler c\+\+ 99.1.0 is too new for CUDA 13.0.88") as refused:
        find_toolchain("13.0", environ)
    assert f"that its nvcc takes is {newest}" in refused.value.why
    assert way_out in refused.value.fix
