"""A small text as Megatron's indexed dataset, for cases that train on text."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


def write_text(folder: Path, token_ids: Callable[[str], list[int]]) -> Path:
    """Write `text.jsonl` as Megatron's indexed dataset, as its tools/preprocess_data.py does.

    `token_ids` gives those of a document, with the one that ends it. Rank 0 writes, and all ranks wait for it. Returns
    the prefix of the files.
    """
    prefix = folder / "text"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(get_bin_path(str(prefix)))
        for line in resources.files(__package__).joinpath("text.jsonl").read_text(encoding="utf-8").splitlines():
            tokens = token_ids(json.loads(line)["text"])
            builder.add_document(torch.tensor(tokens), [len(tokens)])
        builder.finalize(get_idx_path(str(prefix)))
    torch.distributed.barrier()
    return prefix
