"""Checks of what reads a checkpoint of the initial weights back, run by the Python of a stack."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from envbuild_smoke import cpu_shim
from envbuild_smoke.drivers.mcore.checkpoints import save_weights
from envbuild_smoke.drivers.mcore.compare_weights import check_saved_weights


class Chunk(torch.nn.Module):
    """Three weights, one of them an expert's: its shard has an axis more. Those in `left_out` are not saved."""

    def __init__(self, *left_out):
        super().__init__()
        self.left_out = left_out
        self.first = torch.nn.Parameter(torch.randn(8, 4))
        self.second = torch.nn.Parameter(torch.randn(6))
        self.expert = torch.nn.Parameter(torch.randn(3, 2))

    def sharded_state_dict(self, metadata):
        state = {}
        for name, value in self.named_parameters():
            offsets, axes = (((0, 0, 1),), 1) if name == "expert" else ((), 0)
            state[name] = ShardedTensor.from_rank_offsets(name, value, *offsets, prepend_axis_num=axes)
        return {name: shard for name, shard in state.items() if name not in self.left_out}


def saved(folder, *left_out):
    """A chunk, and the checkpoint that it was saved to."""
    chunk, directory = Chunk(*left_out), folder / "initial"
    save_weights([chunk], directory)
    return chunk, directory


def refusal(chunk, directory):
    try:
        check_saved_weights([chunk], directory)
    except ValueError as error:
        assert f"the checkpoint of the initial weights in {directory} " in str(error)
        assert "look at the disk" in str(error)
        return str(error)
    raise AssertionError("the checkpoint was taken")


def what_was_saved_is_taken(folder):
    chunk, directory = saved(folder)
    check_saved_weights([chunk], directory)


def other_values_are_refused(folder):
    chunk, directory = saved(folder)
    for name, value in chunk.named_parameters():
        flat = value.data.view(-1)
        before = flat[-1].clone()
        # The smallest change there is.
        flat[-1] = torch.nextafter(before, torch.tensor(torch.inf))
        assert f"has other values than the model in {name}. " in refusal(chunk, directory)
        flat[-1] = before
    chunk.first.data.mul_(2)
    chunk.second.data.mul_(2)
    assert "has other values than the model in first and 1 more. " in refusal(chunk, directory)


def weights_that_are_absent_are_refused(folder):
    chunk, directory = saved(folder, "second")
    assert "lacks second. " in refusal(chunk, directory)
    # The model asks for more than was saved.
    chunk.left_out = ()
    assert "lacks second. " in refusal(chunk, directory)


def a_part_of_a_weight_is_refused(folder):
    chunk, directory = saved(folder)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    tensors = metadata.state_dict_metadata
    [whole] = tensors["first"].chunks
    tensors["first"] = replace(tensors["first"], chunks=[replace(whole, sizes=torch.Size((4, 4)))])
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "lacks first. " in refusal(chunk, directory)


def what_cannot_be_read_is_refused(folder):
    chunk, directory = saved(folder)
    for pattern in ("*.distcp", ".metadata"):
        [path] = directory.glob(pattern)
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], b"", bytes(len(content))):
            path.write_bytes(damaged)
            assert "cannot be read: " in refusal(chunk, directory)
        path.unlink()
        assert "cannot be read: FileNotFoundError: " in refusal(chunk, directory)
        path.write_bytes(content)
    check_saved_weights([chunk], directory)


CHECKS = (
    what_was_saved_is_taken,
    other_values_are_refused,
    weights_that_are_absent_are_refused,
    a_part_of_a_weight_is_refused,
    what_cannot_be_read_is_refused,
)

if __name__ == "__main__":
    cpu_shim.install()
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for check in CHECKS:
        print(check.__name__, flush=True)
        with tempfile.TemporaryDirectory() as name:
            check(Path(name))
    torch.distributed.destroy_process_group()
