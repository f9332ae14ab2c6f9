"""The bench of a build: jobs, the CUDA_HOME look-alike, and sdists that are none."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.simple_index import make_sdist
from unit.wheels.plans import plan

from envbuild.core.errors import BuildError, CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.wheels.build import Bench, build_wheel, cuda_look_alike, jobs_for, machine_limits
from envbuild.wheels.toolchain import Toolchain

GIB = 2**30


@pytest.mark.parametrize(
    ("gib", "cores", "memory", "jobs"),
    [(4, 16, 128 * GIB, 16), (4, 16, 16 * GIB, 4), (3, 8, 8 * GIB, 2), (4, 8, GIB, 1), (0.5, 1, 64 * GIB, 1)],
)
def test_jobs_fit_into_cores_and_memory(gib, cores, memory, jobs):
    assert jobs_for(gib, cores, memory) == jobs


def test_the_memory_of_a_control_group_counts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    8388608 kB\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path)[1] == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path)[1] == 4 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path) == (len(os.sched_getaffinity(0)), 8 * GIB)


def toolchain(folder: Path) -> Toolchain:
    for name in ("bin/nvcc", "bin/ptxas", "include/cuda.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        (folder / name).chmod(0o755)
    return Toolchain(home=folder, cuda="13.0.88", cc=Path("/usr/bin/gcc"), cxx=Path("/usr/bin/g++"), host="g++ 12")


def test_the_look_alike_has_all_of_the_toolkit_and_another_nvcc(tmp_path):
    home = cuda_look_alike(plan(sm=("90a",), ptx=("90a",)), toolchain(tmp_path / "cuda 13"), tmp_path / "alike")
    assert (home / "include/cuda.h").samefile(tmp_path / "cuda 13/include/cuda.h")
    assert (home / "bin/ptxas").samefile(tmp_path / "cuda 13/bin/ptxas")
    done = subprocess.run([home / "bin/nvcc", "-arch=sm_80", "a b.cu"], capture_output=True, text=True, env={})
    assert done.stdout.splitlines() == ["a b.cu", "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]"]


def bench(tmp_path: Path) -> Bench:
    (tmp_path / "scratch").mkdir()
    return Bench(
        environment=tmp_path / "venv",
        toolchain=toolchain(tmp_path / "cuda"),
        folder=tmp_path / "scratch",
        log=tmp_path / "log",
        jobs=2,
    )


def test_an_sdist_that_is_no_archive_is_refused(tmp_path):
    with pytest.raises(CheckRefusedError, match="cannot be unpacked"):
        build_wheel(plan(), b"nothing", bench(tmp_path), SilentReporter())


def test_missing_headers_are_named(tmp_path):
    sdist = make_sdist(tmp_path, "causal-conv1d", "1.7.0").read_bytes()
    with pytest.raises(CheckRefusedError, match="headers are missing") as refused:
        build_wheel(plan(headers=("nvidia/cudnn/include",)), sdist, bench(tmp_path), SilentReporter())
    assert "lib/python3.10/site-packages/nvidia/cudnn/include" in refused.value.why


def test_a_compiler_that_was_killed_is_explained():
    from envbuild.wheels.build import _failed

    error = _failed(plan(), Bench(
        environment=Path("/v"),
        toolchain=Toolchain(home=Path("/c"), cuda="13.0.88", cc=Path("/g"), cxx=Path("/g"), host="g++ 12"),
        folder=Path("/f"), log=Path("/l"), jobs=4,
    ), 2, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)")  # fmt: skip
    assert isinstance(error, BuildError)
    assert "memory ran out" in error.why
    assert error.fix.endswith("--jobs 2")
