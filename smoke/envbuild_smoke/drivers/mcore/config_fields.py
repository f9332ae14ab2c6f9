"""The library's configuration as it trained: each field of its configuration objects, as text."""

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig

from envbuild_smoke.results import Configuration

# What a model is told next to its configuration (GPTModel, MambaModel), by Megatron-Bridge's name: the argument, and
# the attribute that keeps it.
_OF_MODEL = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "seq_length": ("max_sequence_length", "max_sequence_length"),
    "position_embedding_type": ("position_embedding_type", "position_embedding_type"),
    "rotary_percent": ("rotary_percent", "rotary_percent"),
    "rotary_base": ("rotary_base", "rotary_base"),
    "rope_scaling": ("rope_scaling", "rotary_scaling"),
    "share_embeddings_and_output_weights": (
        "share_embeddings_and_output_weights",
        "share_embeddings_and_output_weights",
    ),
}
# OptimizerParamScheduler's names, and those that Megatron-LM and Megatron-Bridge have for them. Steps are in samples.
_OF_SCHEDULE = {
    "init_lr": "lr_warmup_init",
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_decay_steps": "lr_decay_iters",
    "lr_decay_style": "lr_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
    "wsd_decay_steps": "lr_wsd_decay_iters",
    "lr_wsd_decay_style": "lr_wsd_decay_style",
    "override_opt_param_scheduler": "override_opt_param_scheduler",
}
_PLAIN = (bool, int, float, str, list, tuple, dict, set, type(None))
_LONGEST = 80


def configuration(wrapped: list[torch.nn.Module], optimizer: Any, schedule: Any, *, all_fields: bool) -> Configuration:
    """Return the values of all fields that are not at their default; with `all_fields` also every default.

    `wrapped` are the model's chunks inside of Megatron's DistributedDataParallel. Fields are named `model.`, `ddp.`,
    `optimizer.` and `scheduler.`, as the parts of Megatron-Bridge's configuration.
    """
    # With several kinds of parameters Megatron chains optimizers, each with the same configuration but for the rate.
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    values: dict[str, str] = {}
    defaults: dict[str, str] = {}
    for name, value, default in (
        # Of models without latent attention no value differs from these.
        *((f"model.{name}", default, default) for name, default in _defaults(MLATransformerConfig)),
        *_fields("model", wrapped[0].module.config),
        *_arguments(wrapped[0].module),
        *_fields("ddp", wrapped[0].ddp_config),
        *_fields("optimizer", inner.config),
        *(_scheduled(schedule) if schedule is not None else ()),
    ):
        defaults[name] = _text(default)
        if _text(value) != defaults[name]:
            values[name] = _text(value)
    return Configuration(values=values, defaults=defaults if all_fields else {})


def _fields(section: str, config: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, default in _defaults(config):
        yield f"{section}.{name}", getattr(config, name), default


def _defaults(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        if field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()
        else:
            yield field.name, field.default


def _arguments(module: Any) -> Iterator[tuple[str, Any, Any]]:
    # Float16Module has the model inside.
    model = module.module if hasattr(module, "module") else module
    arguments = inspect.signature(type(model).__init__).parameters
    for name, (argument, attribute) in _OF_MODEL.items():
        # What is a field of the configuration too is taken from there.
        if argument in arguments and hasattr(model, attribute) and not hasattr(model.config, name):
            yield f"model.{name}", getattr(model, attribute), arguments[argument].default


def _scheduled(schedule: Any) -> Iterator[tuple[str, Any, Any]]:
    arguments = inspect.signature(type(schedule).__init__).parameters
    for name, field in _OF_SCHEDULE.items():
        if name in arguments:
            yield f"scheduler.{field}", getattr(schedule, name), arguments[name].default


def _text(value: Any) -> str:
    """Return a value as text that is the same in every process."""
    if value is dataclasses.MISSING or value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return value[:_LONGEST]
    if isinstance(value, _PLAIN):
        return repr(value)[:_LONGEST]
    # Functions by their name: where they lie in memory is another place in each process.
    name = getattr(value, "__name__", None)
    return str(name) if name else type(value).__name__
