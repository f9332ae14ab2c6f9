"""Checkpoints in Megatron's distributed format: initial weights, a training in the middle, final weights.

Every tensor of every layer has a name of its own there, so a layer that is absent is missed by name.
"""

import os
import queue
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from envbuild_smoke.drivers.parts import State

# The name of the random states of a rank in a checkpoint.
_RANDOM = "random"
# megatron-core does not declare psutil, and without it the save of a checkpoint hangs: a helper process
# raises, and the one that waits for it never hears of it.
if not getattr(filesystem_async, "HAVE_PSUTIL", True):
    raise ImportError("psutil is missing: megatron-core needs it to save checkpoints, without declaring it")

# Megatron-LM's name in its checkpoints.
_SCHEDULE = "opt_param_scheduler"


# Tensors in the shape of the parameters, which any layout can load; megatron-core 0.14 has them in another format.
_OPTIMIZER_FORMAT = (
    "fully_reshardable"
    if hasattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats")
    else "fully_sharded_model_space"
)
# megatron-core 0.14 forks a process that writes; later releases write in this one.
_SAVES_HERE = "execute_sync" in TorchDistSaveShardedStrategy.save.__code__.co_names


def _save_here(strategy: Any, state: State, directory: Path) -> None:
    """Save without another process, as a strategy of megatron-core 0.15 does."""
    request = strategy.async_save(state, directory)
    if request.preload_fn is not None:
        # As execute_sync of 0.15: the second argument is what is written, brought to the CPU.
        rank, _, *others = request.async_fn_args
        request = request._replace(async_fn_args=(rank, request.preload_fn(), *others))
    request.execute_sync()


def save_weights(chunks: list[torch.nn.Module], directory: Path) -> None:
    """Save the weights of all chunks of all ranks."""
    _save(weights_state(chunks), directory)


def load_weights(chunks: list[torch.nn.Module], directory: Path) -> None:
    """Load weights that ranks in whatever layout have saved."""
    _put_weights(chunks, dist_checkpointing.load(weights_state(chunks), str(directory)))


def save_training(chunks: list[torch.nn.Module], optimizer: Any, schedule: Any, directory: Path) -> None:
    """Save weights, optimizer, its schedule and random states."""
    _save({**_training_state(chunks, optimizer, loading=False), _SCHEDULE: schedule.state_dict()}, directory)


def load_training(
    chunks: list[torch.nn.Module], optimizer: Any, schedule: Any, directory: Path, *, same_layout: bool
) -> None:
    """Load what ranks in this layout or another have saved with `save_training`.

    Of another layout random states are left out, as Megatron-LM does: ranks keep those that they have begun with.
    """
    _allocate_state(optimizer)
    state = _training_state(chunks, optimizer, loading=True)
    if not same_layout:
        del state[_RANDOM]
    loaded = dist_checkpointing.load(state, str(directory))
    _put_weights(chunks, loaded)
    with _steps_set_aside(_torch_optimizers(optimizer)):
        optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded[_SCHEDULE])
    if same_layout:
        _put_random(loaded[_RANDOM])


def _put_random(states: Any) -> None:
    torch_state, cuda_state, python_state, tracked = states
    torch.set_rng_state(torch_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
    random.setstate(python_state)
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's own optimizers inside of Megatron's; those of Apex and Transformer Engine are not among them."""
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [one for one in inner if type(one).__module__.startswith("torch.optim.")]


def _allocate_state(optimizer: Any) -> None:
    """Have torch's optimizers make their state, which they do in their first step.

    Megatron's sharded optimizer fails when the shape of a state is read that does not exist yet. With
    gradients of zero the step leaves the weights as they are.
    """
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad()


@contextmanager
def _steps_set_aside(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep torch's count of steps out of sight of Megatron's sharded optimizer while it loads.

    Copying loaded tensors into the state, megatron-core 0.16.1 looks for a count for each parameter, of which
    it saves none, and raises a KeyError. The count it did load is one tensor shared by all parameters, which
    each of them would increase; here each gets its own again.
    """
    steps: list[tuple[State, torch.Tensor]] = []

    def set_aside(inner: torch.optim.Optimizer) -> None:
        steps.extend((state, state.pop("step").clone()) for state in inner.state.values())

    handles = [inner.register_load_state_dict_post_hook(set_aside) for inner in optimizers]
    yield
    for handle in handles:
        handle.remove()
    for state, step in steps:
        state["step"] = step


def _metadata() -> State:
    return {
        # A name for each layer and each expert, instead of one tensor over all of them.
        "non_homogeneous_layers": True,
        "singleton_local_shards": True,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": _OPTIMIZER_FORMAT,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def weights_state(chunks: list[torch.nn.Module]) -> State:
    """Return the weights of all chunks of this rank, as Megatron's sharded tensors."""
    # All chunks in one state: loaded one by one, each would lack the other's layers and be refused.
    return {f"model{index}": chunk.sharded_state_dict(metadata=_metadata()) for index, chunk in enumerate(chunks)}


def _put_weights(chunks: list[torch.nn.Module], loaded: State) -> None:
    for index, chunk in enumerate(chunks):
        # Of a layer in Megatron-Bridge's wrapper for LoRA, a checkpoint has the names that it has without.
        modules = dict(chunk.named_modules())
        state = {}
        for name, value in loaded[f"model{index}"].items():
            owner, _, own = name.rpartition(".")
            state[f"{owner}.to_wrap.{own}" if f"{owner}.to_wrap" in modules else name] = value
        chunk.load_state_dict(state)


def _training_state(chunks: list[torch.nn.Module], optimizer: Any, *, loading: bool) -> State:
    weights = weights_state(chunks)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    states = (
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        random.getstate(),
        tensor_parallel.get_cuda_rng_tracker().get_states(),
    )
    return {
        **weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=_metadata()),
        _RANDOM: ShardedObject(_RANDOM, states, (world_size,), (rank,), replica_id=0),
    }


def _save(state: State, directory: Path) -> None:
    """Save a torch_dist checkpoint; the directory appears when it is complete."""
    # A directory of this name is complete: a run that is resumed uses what is there (run/resume.py).
    partial_directory = directory.with_name(f".{directory.name}.partial")
    if torch.distributed.get_rank() == 0:
        for leftover in (partial_directory, directory):
            shutil.rmtree(leftover, ignore_errors=True)
        partial_directory.mkdir(parents=True)
    torch.distributed.barrier()
    # The results of writing travel through a queue in a process of its own, unless there is a queue already.
    # Starting that process takes longer than everything else together, and nothing is written in the background here.
    filesystem_async._results_queue = queue.Queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    if not _SAVES_HERE:
        strategy.save = partial(_save_here, strategy)
    dist_checkpointing.save(state, str(partial_directory), strategy)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        os.replace(partial_directory, directory)
    torch.distributed.barrier()
