"""Imports Megatron-Bridge where Transformer Engine is not installed."""

import builtins
import importlib
import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

# Megatron-Bridge 0.6.2 imports it unguarded, in this module alone, for LoRA on its layers.
NEEDS_IT = "megatron.bridge.peft.lora_layers"


def import_bridge() -> None:
    """Import Megatron-Bridge's pretrain; without Transformer Engine all of it but LoRA on that library's layers."""
    if importlib.util.find_spec("transformer_engine") is not None:
        importlib.import_module("megatron.bridge.training.pretrain")
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
        importlib.import_module("megatron.bridge.training.pretrain")
    finally:
        builtins.__import__ = original
