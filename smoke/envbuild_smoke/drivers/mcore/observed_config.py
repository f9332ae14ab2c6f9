"""What was really built, read from the objects that trained, not from the plan or the configuration."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import Router

from envbuild_smoke.drivers.mcore.attention import ContextParallelAttention, LatentAttention
from envbuild_smoke.drivers.mcore.data import SamplesRead
from envbuild_smoke.drivers.mcore.processes import attention_backends
from envbuild_smoke.environment.libraries import mapped, merged
from envbuild_smoke.plan.models import Case
from envbuild_smoke.results import Observed

_LOCAL_ATTENTION = (DotProductAttention, LatentAttention, ContextParallelAttention)


def observe(case: Case, wrapped: list[torch.nn.Module], optimizer: Any, samples: SamplesRead) -> Observed:
    """Return what model and optimizer are, after training; every rank calls this and gets the same.

    `wrapped` are the chunks of the model inside of Megatron's DistributedDataParallel.

    Where ranks differ, in one name of several or in a number, the names are joined by commas and the largest number
    is given: one rank that is not as the others shows.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, _own(case, wrapped, optimizer, samples))
    return Observed(**{each.name: _joined([getattr(own, each.name) for own in gathered]) for each in fields(Observed)})


def _joined(values: list[Any]) -> Any:
    """Return what ranks observed as one value."""
    if isinstance(values[0], dict):
        return merged(values)
    if not isinstance(values[0], str):
        return None if values[0] is None else max(values)
    # "none" and nothing are of stages without such a part.
    names = {name for value in values for name in value.split(",") if name not in ("", "none")}
    return ",".join(sorted(names)) or values[0]


def _own(case: Case, wrapped: list[torch.nn.Module], optimizer: Any, samples: SamplesRead) -> Observed:
    chunks = [chunk.module for chunk in wrapped]
    named = named_modules(chunks)
    modules = [module for _, module in named]
    attentions = [module for name, module in named if name.endswith("core_attention")]
    # With several kinds of parameters Megatron chains optimizers (optimizer/optimizer.py, ChainedOptimizer).
    inner = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    return Observed(
        layer_spec=layer_spec(modules),
        attention=_classes(attentions),
        attention_backend=_attention_backend(attentions),
        router_gemm=_router_gemm(modules),
        normalization=_normalization(modules),
        optimizer=_classes(getattr(one, "optimizer", one) for one in inner),
        distributed_optimizer=any(type(one).__name__ == "DistributedOptimizer" for one in inner),
        overlap_grad_reduce=any(chunk.ddp_config.overlap_grad_reduce for chunk in wrapped),
        overlap_param_gather=any(chunk.ddp_config.overlap_param_gather for chunk in wrapped),
        gradient_buckets=max(
            len(buffer.buckets) for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ),
        hidden_dropout=_largest(modules, ("hidden_dropout", "embedding_dropout")),
        attention_dropout=_largest(
            # Transformer Engine's attention has one module for each backend.
            [part for module in attentions for part in module.modules()],
            ("attention_dropout",),
        ),
        params_dtype=_types(p for chunk in chunks for p in chunk.parameters()),
        gradients_dtype=_types(
            buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ),
        main_weights_dtype=_narrowest(weight for each in inner for weight in _main_weights(each)),
        cuda_graphs=sum(bool(getattr(module, "cuda_graphs", None)) for module in modules),
        loss_scale=max(float(one.get_loss_scale()) for one in inner),
        parameters=_parameters(chunks),
        trainable_parameters=_parameters(chunks, trainable=True),
        samples_digest=samples.digest(case.training),
        libraries=mapped(),
        # Since the case began: what torch's allocator has given out. On the CPU it has no such number.
        peak_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
    )


def named_modules(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules of the model, without LoRA's adapters.

    Those are Megatron's own layers whatever they adapt (Megatron-Bridge, ParallelLinearAdapter).
    """
    every = [pair for chunk in chunks for pair in chunk.named_modules()]
    return [(name, module) for name, module in every if "adapter" not in name.split(".")]


def _types(tensors: Iterable[torch.Tensor]) -> str:
    return ",".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})) or "none"


def _main_weights(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what an optimizer steps; of weights that it keeps elsewhere, those (Transformer Engine's FusedAdam)."""
    states = getattr(getattr(optimizer, "optimizer", optimizer), "state", {})
    for group in optimizer.param_groups:
        for weight in group["params"]:
            kept = states.get(weight, {}).get("master_param")
            if kept is not None and kept.dtype == torch.int16:
                # The lower half of a float32, whose upper half is the weight (store_param_remainders).
                bits = (weight.detach().view(torch.int16).int() << 16) + kept.int()
                yield bits.view(torch.float32)
            else:
                yield weight if kept is None else kept


def _narrowest(weights: Iterable[torch.Tensor]) -> str:
    """Return bfloat16 where it holds all of these numbers, whatever type they are in, else that type."""
    every = [weight.detach() for weight in weights if weight.numel()]
    wide = [weight for weight in every if not torch.equal(weight.bfloat16().to(weight.dtype), weight)]
    return _types(wide) if wide else "bfloat16" if every else "none"


def _classes(things: Iterable[object]) -> str:
    return ",".join(sorted({f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in things}))


def layer_spec(modules: list[torch.nn.Module]) -> str:
    """Return whose linear layers there are: Transformer Engine's, Megatron's own ("local"), or both, joined."""
    sources = set()
    for module in modules:
        # Megatron's layers under Transformer Engine are subclasses in its own modules: only the bases show whose they
        # are.
        packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        name = type(module).__name__
        if "transformer_engine" in packages and "Linear" in name:
            sources.add("transformer-engine")
        # The output layer is Megatron's own under either spec.
        elif name == "RowParallelLinear":
            sources.add("local")
    return ",".join(sorted(sources))


def _attention_backend(attentions: list[torch.nn.Module]) -> str:
    """Return the backend that computed attention: Transformer Engine records its choice, Megatron's has none.

    Any other class goes by its name.
    """
    backends = set()
    for module in attentions:
        # By its name: where Transformer Engine is not installed there is no such class.
        if any(base.__name__ == "TEDotProductAttention" for base in type(module).__mro__):
            chosen = attention_backends() or {}
            used = [name for name in ("flash", "fused", "unfused") if chosen.get(f"use_{name}_attention")]
            backends.add(",".join(used) or "unknown")
        else:
            backends.add("local" if type(module) in _LOCAL_ATTENTION else type(module).__name__)
    return ",".join(sorted(backends)) or "none"


def _router_gemm(modules: list[torch.nn.Module]) -> str:
    """Return whose matrix product gives a router's scores, under either layer spec; "none" without experts.

    Megatron takes Transformer Engine's where its import has worked (moe_utils.py, RouterGatingLinearFunction).
    """
    if not any(isinstance(module, Router) for module in modules):
        return "none"
    return "torch" if getattr(moe_utils, "te_general_gemm", None) is None else "transformer-engine"


def _normalization(modules: list[torch.nn.Module]) -> str:
    """Return the kinds of norm between layers, joined; Transformer Engine's may be part of a linear layer."""
    kinds = set()
    for module in modules:
        fused = getattr(module, "normalization", None)
        for kind in ("RMSNorm", "LayerNorm"):
            if type(module).__name__ == kind or fused == kind:
                kinds.add(kind)
    return ",".join(sorted(kinds))


def _largest(modules: list[torch.nn.Module], names: tuple[str, ...]) -> float:
    """Return the largest probability of dropout in attributes of these names: a number, or a Dropout."""
    sizes = [0.0]
    for module in modules:
        for name in names:
            value = getattr(module, name, None)
            value = getattr(value, "p", value)
            if isinstance(value, int | float):
                sizes.append(float(value))
    return max(sizes)


def _parameters(chunks: list[torch.nn.Module], *, trainable: bool = False) -> int:
    """Return the number of parameters of the whole model: each rank counts those that no other rank counts.

    With `trainable`, those that are trained alone.
    """
    tensor_first = parallel_state.get_tensor_model_parallel_rank() == 0
    dense_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    expert_first = parallel_state.get_expert_data_parallel_rank() == 0
    own = 0
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        # The last stage's copy of the embedding.
        if getattr(parameter, "shared", False) or (trainable and not parameter.requires_grad):
            continue
        # "allreduce" is False on the parameters of experts.
        first = dense_first if getattr(parameter, "allreduce", True) else expert_first
        # A parameter that is not split is whole on every tensor-parallel rank, and counts on the first alone.
        if first and (tensor_first or getattr(parameter, "tensor_model_parallel", False)):
            own += parameter.numel()
    total = torch.tensor(own, dtype=torch.int64, device=next(chunks[0].parameters()).device)
    torch.distributed.all_reduce(total)
    return int(total)
