"""What libraries need to compile code at run time: without it they fail on GPU machines alone, so it is checked here.

Triton, and with it torch.compile, builds its launchers with a C compiler and Python's headers (its runtime/build.py).
Transformer Engine compiles some kernels with NVRTC and CUDA's headers (its util/cuda_runtime.cpp has the places).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from envbuild.image.checks.contents import ImageContents, ImageFinding
from envbuild.image.scan.models import read_listing

COMPILERS = ("gcc", "clang")
PROGRAMS = ("bin", "usr/bin", "usr/local/bin")
PYTHON_HEADER = re.compile(r"(^|/)include/python3\.\d+t?/Python\.h$")
TOOLKIT_HEADER = re.compile(r"^usr/local/cuda(-[\d.]+)?/(targets/[^/]+/)?include/cuda_runtime\.h$")
CUDA_HEADER = "cuda_runtime.h"
# Where Transformer Engine looks for CUDA's headers: the folder itself, and those that have it as "include".
HEADERS_VARIABLE, TOOLKIT_VARIABLES = "NVTE_CUDA_INCLUDE_DIR", ("CUDA_HOME", "CUDA_DIR")


def compiler(image: ImageContents) -> Iterator[ImageFinding]:
    """An image for GPUs with Triton has what Triton compiles with."""
    if not image.sm or "triton" not in _packages(image):
        return
    paths = _paths(image)
    folders = (*PROGRAMS, f"{image.environment}/bin".lstrip("/"))
    # Triton takes CC as it is, and looks for gcc and clang only without it (its runtime/build.py).
    if "CC" not in image.variables and paths.isdisjoint(f"{folder}/{name}" for folder in folders for name in COMPILERS):
        yield _lacking("C compiler (gcc or clang)")
    if not any(PYTHON_HEADER.search(path) for path in paths):
        yield _lacking("Python's headers (Python.h)")


def cuda_headers(image: ImageContents) -> Iterator[ImageFinding]:
    """An image for GPUs with Transformer Engine has CUDA's headers where it searches for them."""
    if not image.sm or not any(name.startswith("transformer-engine") for name in _packages(image)):
        return
    folders = [image.variables.get(HEADERS_VARIABLE, "")]
    folders += [f"{value}/include" for name in TOOLKIT_VARIABLES if (value := image.variables.get(name))]
    named = {posixpath.normpath(f"{folder}/{CUDA_HEADER}").lstrip("/") for folder in folders if folder}
    if not any(path in named or TOOLKIT_HEADER.match(path) for path in _paths(image)):
        yield ImageFinding(
            text=f"Transformer Engine finds no {CUDA_HEADER} by {', '.join([HEADERS_VARIABLE, *TOOLKIT_VARIABLES])} or "
            "below /usr/local/cuda; kernels that it compiles where it runs fail",
        )


def variables(image: ImageContents) -> Iterator[ImageFinding]:
    """A folder or file of the environment that a variable names is there."""
    named = {
        folder.strip("/"): name
        for name, value in sorted(image.variables.items())
        for folder in map(posixpath.normpath, value.split(":"))
        if folder.startswith(f"{image.environment}/") and image.environment
    }
    if not named:
        return
    there = {
        prefix
        for kept in image.layers
        for entry in read_listing(kept.listing)
        for prefix in named
        if entry.path == prefix or entry.path.startswith(f"{prefix}/")
    }
    for folder, name in named.items():
        if folder not in there:
            yield ImageFinding(text=f"the variable {name} names /{folder}, which is not there")


def _lacking(what: str) -> ImageFinding:
    return ImageFinding(text=f"Triton finds no {what}; torch.compile fails where it runs")


def _packages(image: ImageContents) -> set[str]:
    return {package.name for scan, _ in image.scans() for package in scan.python}


def _paths(image: ImageContents) -> set[str]:
    """The paths of files and links with one of the names that are looked for."""
    names = {*COMPILERS, "Python.h", CUDA_HEADER}
    return {
        entry.path
        for kept in image.layers
        for entry in read_listing(kept.listing)
        if entry.kind in "flh" and posixpath.basename(entry.path) in names
    }
