"""The process of a rank: how it joins the others of a case, and how nothing of the case is left in it.

A rank process runs case after case. What a library keeps in its modules, caches and environment variables
would make the next case another one than in a fresh process.
"""

import copy
import gc
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType

import torch
from megatron.core import parallel_state, rerun_state_machine, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils

from envbuild_smoke.drivers.parts import State, parallel_sizes
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import RankContext

try:
    # Since 0.18, for the losses of routers.
    from megatron.core.transformer.moe import moe_logging as _router_losses
except ImportError:
    _router_losses = moe_utils

# Variables that megatron-core sets to choose an attention backend; it refuses to change one that is set.
_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
# The modules of megatron-core whose globals a case changes: process groups and sizes, the tracker of random states, and
# the losses of routers, for as many layers as the first model with experts had.
_STATEFUL = (parallel_state, parallel_random, _router_losses)


def _state(module: ModuleType) -> State:
    """Return the module's global variables that are state by their name, _LIKE_THIS; what can change is copied."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list) else value
        for name, value in vars(module).items()
        if re.fullmatch(r"_[A-Z][A-Z_]+", name)
    }


# As they are in a process that has done nothing yet: `parallel_state.destroy_model_parallel` forgets a few.
_FRESH = {module: _state(module) for module in _STATEFUL}


@contextmanager
def joined(context: RankContext) -> Iterator[torch.device]:
    """Join the ranks of a task, and yield the device; leave them and clean up when it went well.

    After an exception nothing is cleaned up: peers may hang in the middle of a message, and the process is
    not to be used again.
    """
    on_cuda = context.device == "cuda"
    device = torch.device("cuda", context.device_index) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    variables = {name: os.environ.pop(name) for name in _ATTENTION_VARIABLES if name in os.environ}
    # Not through MASTER_PORT: between choosing a free port and listening on it, another process could take it. The
    # runner listens before it starts the ranks, and rank 0 gets the socket.
    store = torch.distributed.TCPStore(
        context.host,
        context.port,
        world_size=context.world_size,
        is_master=context.rank == 0,
        master_listen_fd=context.listener,
    )
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        # Known from the start, the first barrier need not guess which GPU is this rank's.
        device_id=device if on_cuda else None,
    )
    yield device
    torch.distributed.barrier()
    if on_cuda:
        torch.cuda.synchronize(device)
        _shut_down_at_once()
    torch.distributed.destroy_process_group()
    _clean_up(on_cuda)
    for name in _ATTENTION_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


def _shut_down_at_once() -> None:
    """Shut all process groups down in parallel; `destroy_process_group` does it one by one.

    Each takes half a second with NCCL, and Megatron makes about twenty: 0.5 s instead of 9 s on two H200s
    (torch 2.11). Where a torch keeps its groups elsewhere, they are left to `destroy_process_group`.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    groups = list(getattr(world, "pg_names", ()))
    if groups:
        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(lambda group: group.shutdown(), groups))


def set_up_parallelism(case: Case, device: torch.device) -> None:
    """Make Megatron's process groups and seed every random state, as in a fresh process."""
    # warn_only: torch raises for operations that have no deterministic kernel.
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    layout = case.layout
    parallel_state.initialize_model_parallel(
        **parallel_sizes(layout),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=case.settings.num_distributed_optimizer_instances,
        # Checkpoints of this format need none, and the optimizer is built without them too.
        create_gloo_process_groups=False,
    )
    torch.manual_seed(case.training.seed)
    # Graphs hold the random states of Transformer Engine's tracker alone.
    graphs = {"te_rng_tracker": True} if case.settings.cuda_graph_impl != "none" else {}
    tensor_parallel.model_parallel_cuda_manual_seed(case.training.seed, **graphs)


def is_reporting_rank() -> bool:
    """True on one rank of the last pipeline stage: the first of its tensor, context and data groups."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def forget_parallelism() -> None:
    """Forget Megatron's process groups and random states: others may be set up."""
    parallel_state.destroy_model_parallel()
    for module, fresh in _FRESH.items():
        for name in _state(module).keys() - fresh.keys():
            delattr(module, name)
        for name, value in fresh.items():
            setattr(module, name, copy.copy(value) if isinstance(value, dict | list) else value)


def _clean_up(on_cuda: bool) -> None:
    forget_parallelism()
    rerun_state_machine.destroy_rerun_state_machine()
    # An lru_cache on the method: it keeps the module, and tensors of the last case's device and length.
    RotaryEmbedding.forward.cache_clear()
    forget_transformer_engine()
    # Models, gradient buffers and process groups refer to each other in circles.
    gc.collect()
    if on_cuda:
        torch.cuda.synchronize()
        # The next case on this GPU may run in another process, which sees only what this one gives back.
        torch.cuda.empty_cache()


def forget_transformer_engine() -> None:
    """Reset what Transformer Engine keeps: fp8 scales, and the attention backend that it chose."""
    # The first is where it was before.
    for name in ("transformer_engine.pytorch.fp8", "transformer_engine.pytorch.quantization"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            manager.reset()
    backends = attention_backends()
    if backends is not None:
        backends.update(attention_params=None, backend_selection_requires_update=True)


def attention_backends() -> "State | None":
    """Return Transformer Engine's own record of the attention backend it chose; None when it is not in use."""
    # Looked up, not imported: where nothing of it is in use, it is not to be loaded for this.
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    backends: State | None = getattr(module, "_attention_backends", None)
    return backends
