"""The gradients of a step as a few numbers a tensor, the same ones in every layout: a norm and random projections.

Whole gradients would have to be gathered, stored and read again. Two gradients that are d apart have projections on
vectors of random signs that are about d apart (Achlioptas, Database-friendly random projections, 2003).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

from envbuild_smoke.drivers.mcore.checkpoints import weights_state
from envbuild_smoke.results import PROJECTIONS, Gradient

# The steps of splitmix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014), as signed numbers.
_GOLDEN, _MULTIPLIER = -7046029254386353131, -4658895280553007687


def summarize_gradients(wrapped: list[torch.nn.Module], loss_scale: float = 1.0) -> tuple[Gradient, ...]:
    """Return the gradient of each tensor; every rank calls this and gets the same.

    `wrapped` are the chunks inside of Megatron's DistributedDataParallel, after the backward pass and before clipping,
    of a loss that has this scale.
    Names are those of the tensors in a checkpoint. Numbers are computed in float64.
    """
    for chunk in wrapped:
        _gather_shards(chunk)
    chunks = [chunk.module for chunk in wrapped]
    own: dict[str, torch.Tensor] = {}
    for shard in _main_shards(chunks):
        own[shard.key] = own.get(shard.key, 0) + _numbers(shard)
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    whole: dict[str, torch.Tensor] = {}
    for of_rank in gathered:
        for name, numbers in of_rank.items():
            whole[name] = whole.get(name, 0) + numbers
    return tuple(
        Gradient(
            name=name,
            norm=math.sqrt(float(numbers[0])) / loss_scale,
            projections=tuple((numbers[1:] / loss_scale).tolist()),
        )
        for name, numbers in whole.items()
    )


def _gather_shards(chunk: Any) -> None:
    """Where gradients are sharded over the data-parallel ranks, give each rank the sums of all of them.

    Of a bucket each rank has its own shard reduced, and its own unreduced gradients elsewhere.
    """
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        size = group.intra_distributed_optimizer_instance_size
        for bucket in group.buckets if size > 1 else ():
            own = bucket.grad_data.view(size, -1)[group.intra_distributed_optimizer_instance_rank].clone()
            torch.distributed.all_gather_into_tensor(
                bucket.grad_data, own, group=group.intra_distributed_optimizer_instance_group
            )


def _main_shards(chunks: list[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Yield this rank's parts of the gradients as a checkpoint has those of the weights, each part on one rank only."""
    gradient_of = _Gradients(chunks)
    shards = []
    for value in nested_values(weights_state(chunks)):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            value.data = gradient_of(value.data)
            shards += [value] if value.data is not None else []
    state = {"gradients": shards}
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            yield value


class _Gradients:
    """Finds the gradient that belongs to a tensor which is a weight, or a part of one.

    Weights are not replaced by their gradients for a moment: with another type, torch forgets the hooks on which
    Megatron's DistributedDataParallel rests (torch/csrc/autograd/variable.cpp, set_data), and later gradients are zero.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._parameters = sorted(
            (parameter for chunk in chunks for parameter in chunk.parameters()), key=torch.Tensor.data_ptr
        )
        self._places = [parameter.data_ptr() for parameter in self._parameters]

    def __call__(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the same elements; None for what is no weight."""
        index = bisect_right(self._places, part.data_ptr()) - 1
        if index < 0:
            return None
        whole = self._parameters[index]
        first = (part.data_ptr() - whole.data_ptr()) // whole.element_size()
        gradient = getattr(whole, "main_grad", None)
        if gradient is None or first >= whole.numel():
            return None
        return gradient.as_strided(part.size(), part.stride(), gradient.storage_offset() + first)


def _numbers(shard: ShardedTensor) -> torch.Tensor:
    """Return the part's sum of squares and its parts of the projections, on the CPU."""
    values = shard.data.detach().double().reshape([1] * shard.prepend_axis_num + list(shard.data.shape))
    # The place of each element in the whole tensor: what its sign is made of, whatever rank has it.
    places = torch.zeros_like(values, dtype=torch.int64)
    for axis, (offset, length) in enumerate(zip(shard.global_offset, values.shape, strict=True)):
        along = torch.arange(offset, offset + length, device=values.device) * math.prod(shard.global_shape[axis + 1 :])
        places += along.view([-1 if other == axis else 1 for other in range(values.dim())])
    projections = [(values * _signs(places, number)).sum() for number in range(1, PROJECTIONS + 1)]
    return torch.stack([values.square().sum(), *projections]).cpu()


def _signs(places: torch.Tensor, number: int) -> torch.Tensor:
    mixed = (places + 1) * _GOLDEN + number
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER
    return 1 - 2 * ((mixed ^ (mixed >> 27)) & 1)
