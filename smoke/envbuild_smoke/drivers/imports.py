"""Imports a framework without starting CUDA: a process that has started it cannot be forked into ranks."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils import cpp_extension

# Start CUDA as they are imported. No recipe here uses them, and their users take their absence.
_UNUSED = ("fla", "flashinfer")


@contextmanager
def cuda_not_asked() -> Iterator[None]:
    """While libraries are imported, keep those that ask for the GPU from starting CUDA.

    modelopt 0.37 and 0.47 ask torch for the compute capability, flash-linear-attention (`fla`) through Triton, and
    flashinfer 0.6.8 for the number of multiprocessors. megatron-core 0.15 compiles an allocator for inference where
    there is a C++ compiler, for the capability of each GPU. nvidia-cutlass-dsl 4.5, which mamba-ssm imports, asks the
    driver itself. No recipe's pretrain uses what they leave out without an answer.
    """
    driver = _driver_bindings()
    start = getattr(driver, "cuInit", None)
    if driver is not None:
        driver.cuInit = _not_now
    capability, load_inline = torch.cuda.get_device_capability, cpp_extension.load_inline
    torch.cuda.get_device_capability = no_capability
    cpp_extension.load_inline = _not_now
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.cuda.get_device_capability, cpp_extension.load_inline = capability, load_inline
        if driver is not None:
            driver.cuInit = start
        for name in hidden:
            del sys.modules[name]


def _driver_bindings() -> Any:
    """Return NVIDIA's Python bindings of the driver, or None; as they are imported they do not start it."""
    try:
        return importlib.import_module("cuda.bindings.driver")
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
