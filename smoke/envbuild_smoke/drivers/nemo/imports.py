"""Imports what NeMo needs without starting CUDA: a process that has started it cannot be forked into ranks."""

import importlib

import torch


def import_modelopt() -> None:
    """Import NVIDIA's modelopt, where it is installed, as if the GPU had no fp8.

    modelopt.torch.quantization.triton (0.37) asks for the compute capability as it is imported, which starts CUDA.
    Without the answer it leaves out its Triton kernels for simulated quantization, which no recipe's pretrain calls.
    """
    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = no_capability
    try:
        importlib.import_module("modelopt.torch.quantization")
    except ModuleNotFoundError as error:
        if error.name != "modelopt":
            raise
    finally:
        torch.cuda.get_device_capability = original


def no_capability(*_arguments: object, **_options: object) -> tuple[int, int]:
    """Return a compute capability that no GPU has."""
    return 0, 0
