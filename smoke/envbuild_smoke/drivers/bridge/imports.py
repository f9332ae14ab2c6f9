"""Imports Megatron-Bridge without starting CUDA, also where Transformer Engine is not installed."""

import builtins
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from envbuild_smoke.drivers.imports import cuda_not_asked

# Megatron-Bridge 0.6.2 imports it unguarded, in this module alone, for LoRA on its layers.
NEEDS_IT = "megatron.bridge.peft.lora_layers"


def import_bridge() -> None:
    """Import Megatron-Bridge's pretrain; without Transformer Engine all of it but LoRA on that library's layers."""
    with cuda_not_asked(), transformer_engine_or_stub():
        importlib.import_module("megatron.bridge.training.pretrain")


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
