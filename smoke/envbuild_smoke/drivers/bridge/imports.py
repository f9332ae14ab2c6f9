"""Imports Megatron-Bridge without starting CUDA, also where Transformer Engine is not installed."""

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from envbuild_smoke.drivers.nemo.imports import no_capability

# Megatron-Bridge 0.6.2 imports it unguarded, in this module alone, for LoRA on its layers.
NEEDS_IT = "megatron.bridge.peft.lora_layers"
# Start CUDA as they are imported. No recipe here uses them, and their users take their absence.
UNUSED = ("fla", "flashinfer")


def import_bridge() -> None:
    """Import Megatron-Bridge's pretrain; without Transformer Engine all of it but LoRA on that library's layers."""
    with cuda_not_asked(), transformer_engine_or_stub():
        importlib.import_module("megatron.bridge.training.pretrain")


@contextmanager
def cuda_not_asked() -> Iterator[None]:
    """While libraries are imported, keep those that ask for the GPU from starting CUDA.

    modelopt 0.47 asks torch for its capability, flash-linear-attention (`fla`) through Triton, and flashinfer 0.6.8 for
    the number of multiprocessors. Measured on an H100: one of the first two alone starts CUDA.
    """
    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = no_capability
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original
        for name in hidden:
            del sys.modules[name]


@contextmanager
def transformer_engine_or_stub() -> Iterator[None]:
    """Where Transformer Engine is missing, answer the one module that imports it unguarded with a stub."""
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    original = builtins.__import__
    # What its annotations name. Nothing goes into sys.modules: megatron-core sees that there is none.
    stub = SimpleNamespace(pytorch=SimpleNamespace(ops=SimpleNamespace(Sequential=object)))

    def with_stub(name: str, names: Any = None, *arguments: Any, **options: Any) -> ModuleType | SimpleNamespace:
        if name.startswith("transformer_engine") and (names or {}).get("__name__") == NEEDS_IT:
            return stub
        module: ModuleType = original(name, names, *arguments, **options)
        return module

    builtins.__import__ = with_stub  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.__import__ = original
