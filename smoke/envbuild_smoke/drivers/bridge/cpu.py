"""What Megatron-Bridge asks of CUDA beyond megatron-core (`envbuild_smoke.cpu_shim`), answered from the CPU."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.bridge.peft import utils
from megatron.bridge.training import setup
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention

_ORIGINAL_INITIALIZE = setup.initialize_megatron
_ORIGINAL_ATTENTION = DotProductAttention.forward


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


def _attention(
    self: DotProductAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    packed_seq_params: PackedSeqParams | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend inside of each sample of a row, [tokens, heads, head size]; Megatron's own refuses packed ones."""
    if packed_seq_params is None:
        whole: torch.Tensor = _ORIGINAL_ATTENTION(self, query, key, value, *arguments, **options)
        return whole
    place = torch.arange(query.size(0))
    sample = torch.searchsorted(packed_seq_params.cu_seqlens_q.flatten()[1:].contiguous(), place, right=True)
    hidden = (sample[:, None] != sample) | (place > place[:, None])
    groups = query.size(1) // key.size(1)
    keys, values = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (key, value))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(query.size(2))
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).flatten(start_dim=1)


def install() -> None:
    """Put the redirects in place in this process."""
    DotProductAttention.forward = _attention
    # Compiled for a CPU, Megatron's fused functions need a C++ compiler, and a minute each.
    torch.compiler.set_stance("force_eager")
    # The model is wrapped in a stream of its own.
    torch.cuda.Stream = torch.cuda.current_stream = _no_stream
    torch.cuda.stream = _in_no_stream
    # No layer is Transformer Engine's; where that is missing LoRA asks for its layers nevertheless.
    utils.HAVE_TE = False
    setup.initialize_megatron = _initialize
    setup.set_jit_fusion_options = _no_warm_up
