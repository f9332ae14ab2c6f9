"""Compares the weights that two cases end with, each read from its checkpoint, from all shards, by one process."""

import math
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from envbuild_smoke.drivers.mcore.checkpoints import weights_state
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import Weights


def compare_weights(context: RankContext) -> Weights:
    """Compare the final weights of the case with those of its baseline; one process does this alone.

    The difference of a tensor is ||own - baseline|| / ||baseline||, in float64 over all its elements (where
    the baseline's are all zero: ||own||). A tensor of
    which any part is absent counts as missing. Values that are not finite raise FloatingPointError.
    """
    own, own_partial = read_weights(context.final_checkpoint)
    baseline, baseline_partial = read_weights(context.baseline_final_checkpoint)
    if not baseline or baseline_partial:
        raise ValueError(
            f"the baseline's final weights in {context.baseline_final_checkpoint} are incomplete: "
            f"{', '.join(baseline_partial) or 'no tensors at all'}"
        )
    differences = {name: _difference(name, own[name], baseline[name]) for name in baseline if name in own}
    worst = max(differences, key=lambda name: differences[name], default="")
    return Weights(
        compared_with=str(context.case.baseline),
        tensors=len(differences),
        largest_relative_difference=differences.get(worst, 0.0),
        worst=worst,
        missing=tuple(sorted(baseline.keys() - own.keys())),
        unexpected=tuple(sorted({*own, *own_partial} - baseline.keys())),
    )


def read_weights(directory: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors of a checkpoint by name, whole, and the names of those of which a part is absent."""
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata().state_dict_metadata
    tensors, partial = {}, []
    for name, stored in metadata.items():
        # Objects (extra states of Transformer Engine's layers) are no weights.
        if not isinstance(stored, TensorStorageMetadata):
            continue
        # Loading silently leaves what no shard covers as it was.
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(stored.size):
            tensors[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
        else:
            partial.append(name)
    # This process reads all shards by itself: there is no process group.
    load_checkpoint(tensors, storage_reader=FileSystemReader(directory), no_dist=True)
    return tensors, sorted(partial)


def check_saved_weights(chunks: list[torch.nn.Module], directory: Path) -> None:
    """Require that a checkpoint of this one rank's weights has each of them, bit for bit, read without Megatron.

    So what trains and what the reference trains from is what the checkpoint has, which all other cases load. Raises
    ValueError for a checkpoint that cannot be read, or lacks a weight, or has another.
    """
    try:
        stored, _ = read_weights(directory)
    # torch raises what its readers, zipfile and pickle do, some of it within a BaseException of its own.
    except (Exception, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ValueError(
            f"the checkpoint of the initial weights in {directory} cannot be read: {type(cause).__name__}: {cause}. "
            "The reference and the other cases start from it: look at the disk that it is on"
        ) from error
    state = weights_state(chunks)
    apply_factories(state)
    shards = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    lacking = sorted({shard.key for shard in shards} - stored.keys()) or _unsaved(chunks, shards)
    other = sorted({shard.key for shard in shards if shard.key in stored and not _has(stored[shard.key], shard)})
    for names, words in ((lacking, "lacks"), (other, "has other values than the model in")):
        if names:
            shown = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
            raise ValueError(
                f"the checkpoint of the initial weights in {directory} {words} {shown}. The reference and the other "
                "cases start from it: look at the disk that it is on, and at what saves checkpoints"
            )


def _unsaved(chunks: list[torch.nn.Module], shards: list[ShardedTensor]) -> list[str]:
    """Return the names of weights of which Megatron's state for a checkpoint has nothing."""
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    if sum(shard.data.numel() for shard in shards) >= sum(value.numel() for _, value in named):
        return []
    places = {shard.data.data_ptr() for shard in shards}
    return [name for name, value in named if value.data_ptr() not in places] or ["a part of a weight"]


def _has(stored: torch.Tensor, shard: ShardedTensor) -> bool:
    """Whether a whole tensor has the values of a shard in its place."""
    own = shard.data.detach().cpu()
    # Of axes that are prepended, as those of layers in one tensor, a shard has one place each.
    own = own.reshape([1] * shard.prepend_axis_num + list(own.shape))
    place = tuple(slice(at, at + size) for at, size in zip(shard.global_offset, own.shape, strict=True))
    return bool(torch.equal(stored[place], own))


def _difference(name: str, own: torch.Tensor, baseline: torch.Tensor) -> float:
    if own.shape != baseline.shape:
        raise ValueError(f"{name}: found shape {list(own.shape)}; the baseline's is {list(baseline.shape)}")
    distance = float(torch.linalg.vector_norm(own.double() - baseline.double()))
    size = float(torch.linalg.vector_norm(baseline.double()))
    if not math.isfinite(distance) or not math.isfinite(size):
        raise FloatingPointError(f"final weights: {name} is not finite everywhere")
    return distance / size if size > 0 else distance
