"""Options of a case that NeMo and Megatron-Bridge call by the same names."""

from typing import Any

import torch

from envbuild_smoke.drivers.mcore.model import fp8_options
from envbuild_smoke.drivers.parts import Options, parallel_sizes
from envbuild_smoke.plan.axes import Settings
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import RankContext


def set_layout(config: Any, case: Case) -> None:
    """Set the parallel sizes of a case in NeMo's strategy or in Megatron-Bridge's model configuration."""
    for name, size in parallel_sizes(case.layout).items():
        setattr(config, name, size)
    config.sequence_parallel = case.layout.sequence
    config.pipeline_dtype = _dtype(case)


def overlap_options(settings: Settings) -> Options:
    """Return the options with which pipeline stages send while they compute."""
    return {
        "tp_comm_overlap": False,
        "overlap_grad_reduce": settings.overlap_grad_reduce,
        "overlap_param_gather": settings.overlap_param_gather,
        "align_param_gather": False,
        "bucket_size": settings.bucket_size,
    }


def precision_options(case: Case, context: RankContext) -> Options:
    """Return the options of mixed precision for a case in fp32 or fp8."""
    options = {"params_dtype": _dtype(case), "pipeline_dtype": _dtype(case), "autocast_enabled": False}
    if case.precision != "fp8":
        return options
    fp8 = fp8_options(case, torch.device("cuda", context.device_index))
    named = {"fp8": fp8["fp8"], "fp8_recipe": fp8["fp8_recipe"], "fp8_param_gather": fp8["fp8_param"]}
    return {**options, "grad_reduce_in_fp32": True, **named}


def _dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.precision == "fp32" else torch.bfloat16
