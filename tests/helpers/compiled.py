"""Shared libraries for tests, compiled here by the real compilers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

KERNEL = 'extern "C" __global__ void twice(float *values) { values[threadIdx.x] *= 2.0f; }\n'
NO_KERNEL = "int nothing() { return 1; }\n"


def shared(out: Path, source: str, *flags: str | Path) -> Path:
    """A shared library from C++ source."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{out.name}", "-o", out, "-xc++", "-", "-xnone", *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return out


def gpu_library(out: Path, nvcc: Path, sm: Sequence[str], ptx: Sequence[str] = (), *, source: str = KERNEL) -> Path:
    """A shared library with GPU code for these SMs."""
    out.parent.mkdir(parents=True, exist_ok=True)
    (out.parent / "source.cu").write_text(source)
    pairs = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in sm]
    pairs += [f"-gencode=arch=compute_{one},code=compute_{one}" for one in ptx]
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", *pairs, "-o", out, out.parent / "source.cu"]
    subprocess.run(command, check=True)
    (out.parent / "source.cu").unlink()
    return out
