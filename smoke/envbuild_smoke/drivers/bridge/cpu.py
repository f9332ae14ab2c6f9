"""What Megatron-Bridge asks of CUDA beyond megatron-core (`envbuild_smoke.cpu_shim`), answered from the CPU."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.bridge.peft import utils
from megatron.bridge.training import setup
from megatron.core import tensor_parallel

_ORIGINAL_INITIALIZE = setup.initialize_megatron


def _initialize(cfg: Any, **options: Any) -> Any:
    """Call initialize_megatron for the CPU, where it seeds no random states of tensor parallelism."""
    result = _ORIGINAL_INITIALIZE(cfg=cfg, allow_no_cuda=True, **options)
    tensor_parallel.model_parallel_cuda_manual_seed(cfg.rng.seed)
    return result


class _NoStream:
    """The stream of a CPU, which has done all that it was given."""

    def wait_stream(self, _other: object) -> None:
        """Wait for nothing."""


def _no_stream(*_arguments: object, **_options: object) -> _NoStream:
    return _NoStream()


def _in_no_stream(_stream: object) -> nullcontext[None]:
    return nullcontext()


def _no_warm_up(*_arguments: object) -> None:
    """Leave out the warm-up of fused kernels."""


def install() -> None:
    """Put the redirects in place in this process."""
    # Compiled for a CPU, Megatron's fused functions need a C++ compiler, and a minute each.
    torch.compiler.set_stance("force_eager")
    # The model is wrapped in a stream of its own.
    torch.cuda.Stream = torch.cuda.current_stream = _no_stream
    torch.cuda.stream = _in_no_stream
    # No layer is Transformer Engine's; where that is missing LoRA asks for its layers nevertheless.
    utils.HAVE_TE = False
    setup.initialize_megatron = _initialize
    setup.set_jit_fusion_options = _no_warm_up
