"""A small text as Megatron's indexed dataset, for cases that train on text."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path


def write_text(folder: Path, token_ids: Callable[[str], list[int]], vocabulary_size: int) -> Path:
    """Write `text.jsonl` as Megatron's indexed dataset, as its tools/preprocess_data.py does.

    `token_ids` gives those of a document, with the one that ends it. Rank 0 writes, and all ranks wait for it. Returns
    the prefix of the files. Raises ValueError when a token is not of the vocabulary, or the files are not whole.
    """
    prefix = folder / "text"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(get_bin_path(str(prefix)))
        for line in resources.files(__package__).joinpath("text.jsonl").read_text(encoding="utf-8").splitlines():
            tokens = token_ids(json.loads(line)["text"])
            # Megatron reads it without a complaint, and the embedding another row or none.
            if (largest := max(tokens)) >= vocabulary_size:
                raise ValueError(
                    f"the tokenizer does not fit the model: it makes token {largest} of the text, and the vocabulary "
                    f"has {vocabulary_size}"
                )
            builder.add_document(torch.tensor(tokens), [len(tokens)])
        builder.finalize(get_idx_path(str(prefix)))
    torch.distributed.barrier()
    demand_whole(prefix)
    return prefix


def demand_whole(prefix: Path) -> None:
    """Raise ValueError, which names the file, when this process does not see all of a dataset."""
    bin_path, idx_path = Path(get_bin_path(str(prefix))), Path(get_idx_path(str(prefix)))
    try:
        # Held: as it goes, it unmaps what its index points to.
        dataset = IndexedDataset(str(prefix))
        needed = int(dataset.index.sequence_lengths.sum()) * dataset.index.dtype_size
    except Exception as error:
        raise ValueError(f"{idx_path} and {bin_path} cannot be read, as if they were cut short: {error}") from error
    if (size := bin_path.stat().st_size) != needed:
        raise ValueError(f"{bin_path} has {size} bytes and its index says {needed}: it was cut short")
