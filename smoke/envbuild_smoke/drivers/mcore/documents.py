"""Documents in Megatron's indexed files, and its GPTDataset over them, as pretraining reads them."""

from pathlib import Path

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from envbuild_smoke.drivers.samples import documents
from envbuild_smoke.drivers.text import demand_whole
from envbuild_smoke.plan.models import Case, Model


class _Tokenizer:
    """What GPTDataset asks a tokenizer for: its size, the token that ends a document, and a name for its cache."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.unique_identifiers = {"class": "documents", "vocab_size": vocab_size}


class DocumentSamples:
    """The samples of a training that reads documents; made by all ranks together."""

    def __init__(self, case: Case, model: Model, folder: Path) -> None:
        """Rank 0 writes the documents into `folder`. Raises ValueError when this rank does not see all of them."""
        training = case.training
        self._per_step = training.global_batch_size
        number = training.steps * training.global_batch_size
        prefix = folder / "documents"
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            builder = IndexedDatasetBuilder(get_bin_path(str(prefix)))
            for document in documents(training.seed, number, model.sequence_length, model.vocabulary_size):
                builder.add_document(document, [len(document)])
            builder.finalize(get_idx_path(str(prefix)))
        torch.distributed.barrier()
        demand_whole(prefix)
        config = GPTDatasetConfig(
            random_seed=training.seed,
            sequence_length=model.sequence_length,
            blend=([str(prefix)], None),
            # All of it is for training.
            split="1,0,0",
            path_to_cache=str(folder / "index"),
            tokenizer=_Tokenizer(model.vocabulary_size),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        sizes = [number, None, None]
        self._dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]

    def batch(self, step: int) -> torch.Tensor:
        """Return the samples of a step, shape [global batch, sequence + 1], int64; steps begin with 1."""
        # As Megatron's samplers do: in the dataset's order, which is shuffled.
        first = (step - 1) * self._per_step
        read = (self._dataset[index] for index in range(first, first + self._per_step))
        return torch.stack([torch.cat((each["tokens"], each["labels"][-1:])) for each in read]).long()
