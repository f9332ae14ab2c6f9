"""A CUDA toolkit for tests: this machine's, else nvcc's packages from the index; and an sdist that compiles with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from helpers.simple_index import make_sdist

from envbuild.core import locks
from envbuild.core.errors import MachineError
from envbuild.lock.uv import uv_program
from envbuild.wheels.toolchain import Toolchain, find_toolchain

CUDA = "13.0"
# Everything that compiling a kernel takes: the compiler, its internals, headers, the runtime.
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


def toolkit(folder: Path) -> Toolchain:
    """A toolkit of version :data:`CUDA`; installed into ``folder`` where this machine has none."""
    try:
        return find_toolchain(CUDA)
    except MachineError:
        with locks.exclusive(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _install(folder)
        return find_toolchain(CUDA, {**os.environ, "CUDA_HOME": str(folder)})


def _install(folder: Path) -> None:
    """The packages laid out as a toolkit, the libraries in lib64."""
    staged = folder.with_suffix(".staged")
    shutil.rmtree(staged, ignore_errors=True)
    command = [uv_program(), "pip", "install", "-q", "--target", staged, "--python", sys.executable]
    subprocess.run([*command, *(f"{name}=={CUDA}.*" for name in PACKAGES)], check=True)
    home = staged / "nvidia" / f"cu{CUDA.partition('.')[0]}"
    (home / "lib64").symlink_to("lib")
    for library in (home / "lib").glob("lib*.so.*"):
        plain = library.with_name(library.name.partition(".so")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    home.rename(folder)


KERNEL = """\
extern "C" __global__ void twice(float *values) { values[threadIdx.x] *= 2.0f; }
extern "C" int answer() { return 42; }
"""
MODULE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
extern "C" int answer();
static PyObject *call(PyObject *, PyObject *) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"answer", call, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernels", "", -1, methods};
PyMODINIT_FUNC PyInit_kernels() { return PyModule_Create(&module); }
"""
# As causal-conv1d's: it names its architectures itself, and asks torch's way for nvcc.
SETUP = """\
import os, subprocess, sysconfig
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SM = {sm}
GENCODE = [word for sm in SM for word in ("-gencode", f"arch=compute_{{sm}},code=sm_{{sm}}")]


class Build(build_ext):
    def build_extension(self, extension):
        nvcc = os.environ.get("PYTORCH_NVCC") or os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc")
        {before}
        out = self.get_ext_fullpath(extension.name)
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        include = sysconfig.get_paths()["include"]
        subprocess.run(
            [nvcc, *GENCODE, "-shared", "-Xcompiler", "-fPIC", "-I", include, "-o", out, *extension.sources, {link}],
            check=True,
        )


setup(
    name="kernels",
    version="1.0",
    ext_modules=[Extension("kernels", ["kernel.cu", "module.cpp"])],
    cmdclass={{"build_ext": Build}},
)
"""
PYPROJECT = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'


def make_kernels(
    folder: Path,
    sm: Sequence[str] = ("75", "80", "90", "100"),
    *,
    name: str = "kernels",
    before: str = "",
    link: str = "",
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The sdist of ``kernels`` 1.0: a CUDA extension whose setup.py compiles for all of ``sm``.

    Args:
        name: another name for the package and its module.
        before: a statement that its build runs first.
        link: more arguments of its compiler, as Python source.
        files: more files, by their names.
    """
    setup = SETUP.format(sm=list(sm), before=before or "pass", link=link)
    own = {"setup.py": setup, "kernel.cu": KERNEL, "module.cpp": MODULE}
    texts = {file: text.replace("kernels", name) for file, text in own.items()}
    return make_sdist(folder, name, "1.0", pyproject=PYPROJECT, files={**texts, **files})
