"""Imports a framework without starting CUDA: a process that has started it cannot be forked into ranks."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

# Start CUDA as they are imported. No recipe here uses them, and their users take their absence.
_UNUSED = ("fla", "flashinfer")
# What libraries call for it, by module.
_STARTERS = {"torch.utils.cpp_extension": "load_inline", "cuda.bindings.driver": "cuInit"}


@contextmanager
def cuda_not_asked() -> Iterator[None]:
    """While libraries are imported, keep those that ask for the GPU from starting CUDA.

    modelopt 0.37 and 0.47 ask torch for the compute capability, flash-linear-attention (`fla`) through Triton, and
    flashinfer 0.6.8 for the number of multiprocessors. megatron-core 0.15 compiles an allocator for inference where
    there is a C++ compiler, for the capability of each GPU. nvidia-cutlass-dsl 4.5, which mamba-ssm imports, asks the
    driver itself. No recipe's pretrain uses what they leave out without an answer.
    """
    replaced = [(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)]
    for module, function in _STARTERS.items():
        if (module_there := _if_there(module)) is not None:
            replaced.append((module_there, function, getattr(module_there, function)))
            setattr(module_there, function, _not_now)
    torch.cuda.get_device_capability = no_capability
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for owner, function, original in replaced:
            setattr(owner, function, original)
        for name in hidden:
            del sys.modules[name]


def _if_there(module: str) -> Any:
    """Return a module, or None: without setuptools torch compiles nothing, and not all have the driver's bindings."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def no_capability(*_arguments: object, **_options: object) -> tuple[int, int]:
    """Return a compute capability that no GPU has."""
    return 0, 0


def _not_now(*_arguments: Any, **_options: Any) -> NoReturn:
    """Raise what torch raises where there is no compiler, and cutlass expects where there is no GPU.

    Not an error of the driver's: the bindings would load its functions to ask it for the error's name.
    """
    raise RuntimeError("nothing is compiled, and no GPU is asked, while libraries are imported")
