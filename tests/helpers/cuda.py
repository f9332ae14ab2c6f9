"""A CUDA toolkit for tests: this machine's, else nvcc's packages from the index; and an sdist that compiles with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from helpers.locks import DIGEST, make_lock
from helpers.simple_index import make_sdist

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.core.errors import MachineError
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import Inputs, LockedBase, LockedTorch
from envbuild.store.local import LocalStore
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolchain import Toolchain, find_toolchain
from envbuild.wheels.toolchain.toolkit import ToolkitRequest, choose_toolkit

CUDA = "13.0"
# A day on which the index had all of CUDA 13.0.
AS_OF = "2026-05-16T00:00:00Z"


def toolkit(folder: Path) -> Toolchain:
    """A toolkit of version :data:`CUDA`; installed below ``folder`` where this machine has none."""
    try:
        return find_toolchain(CUDA)
    except MachineError:
        return choose_toolkit(
            ToolkitRequest.INDEX, bare_lock(folder / "lock"), CUDA, sources(folder / "store")
        ).toolchain()


def bare_lock(folder: Path, main: str = "# nothing\n", cuda: str = CUDA, as_of: str = AS_OF) -> LockDirectory:
    """A lock for a base with CUDA, without torch, whose phase main is this requirements file."""
    base = LockedBase(
        name="debian12-cu130",
        definition_digest=DIGEST,
        distribution="debian",
        release="12",
        platform="linux/amd64",
        glibc="2.36",
        python="3.11",
        cuda=cuda,
    )
    torch = LockedTorch(version="", build="index", found_in="package-index")
    inputs = Inputs(digest=DIGEST, stack_digest=DIGEST, base_digest=DIGEST, torch_build="index", uv="0", as_of=as_of)
    return LockDirectory(folder, make_lock(folder, main, base=base, torch=torch, inputs=inputs))


def sources(store: Path, reporter: Reporter | None = None) -> WheelSources:
    """Where packages come from: the index that uv uses, and a store of the test's own."""
    chosen = reporter or SilentReporter()
    base = Catalog.open(data_root()).base("debian12-cu130")
    return WheelSources(base=base, site=load_site(), store=LocalStore(store, chosen), reporter=chosen)


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
