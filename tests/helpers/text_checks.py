"""Checks of the text that recipes train on, run by the Python of a stack in one process."""

import sys
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from envbuild_smoke.drivers.text import demand_whole, write_text


def refused(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


folder = Path(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
prefix = write_text(folder / "whole", lambda text: [*text.encode(), 256], 257)
dataset = IndexedDataset(str(prefix))
assert dataset[0][-1] == 256
del dataset

words = refused(write_text, folder / "small", lambda text: [*text.encode(), 256], 256)
assert words.endswith("it makes token 256 of the text, and the vocabulary has 256"), words

for suffix, lengths in ((".bin", (0, 1000)), (".idx", (0, 10, 100))):
    file = Path(f"{prefix}{suffix}")
    whole = file.read_bytes()
    for length in lengths:
        file.write_bytes(whole[:length])
        words = refused(demand_whole, prefix)
        assert str(file) in words, words
        assert "cut short" in words, words
    file.write_bytes(whole)
demand_whole(prefix)

# As where another node's ranks read it before all of it is there.
torch.distributed.barrier = lambda: Path(f"{folder / 'cut/text'}.bin").write_bytes(b"")
assert "cut short" in refused(write_text, folder / "cut", lambda text: [*text.encode(), 256], 257)
torch.distributed.destroy_process_group()
