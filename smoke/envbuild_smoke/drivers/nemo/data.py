"""NeMo's mock data, and a record of which samples a rank has read."""

from typing import Any

import torch
from nemo.collections.llm.gpt.data.mock import MockDataModule
from torch.utils.data import DataLoader

from envbuild_smoke.drivers.mcore.data import SamplesRead


class RecordedMockData(MockDataModule):  # type: ignore[misc]
    """NeMo's MockDataModule, which keeps the samples that this rank was given; they are drawn from their index."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._read: list[torch.Tensor] = []

    def _create_dataloader(self, dataset: Any, **options: Any) -> "DataLoader[Any]":
        # NeMo 2.7.3 passes its wish for a mask in the place of the seed (mock.py); without Transformer Engine the model
        # asks for one.
        if self.create_attention_mask and not dataset.create_attention_mask:
            dataset.attention_mask = torch.ones(1, self.seq_length, self.seq_length).tril() < 0.5
            dataset.create_attention_mask = True
        loader: DataLoader[Any] = super()._create_dataloader(dataset, **options)
        collate = loader.collate_fn

        def noted(samples: "list[dict[str, torch.Tensor]]") -> Any:
            # With the last label: the whole sample, [sequence + 1].
            self._read.extend(torch.cat((each["tokens"], each["labels"][-1:])) for each in samples)
            return collate(samples)

        loader.collate_fn = noted
        return loader

    def samples_read(self, steps: int, per_step: int) -> SamplesRead:
        """Return what this rank has read, as steps of `per_step` samples; what was fetched ahead is left out."""
        read = SamplesRead()
        for step in range(steps):
            read.start_step()
            for sample in self._read[step * per_step : (step + 1) * per_step]:
                read.add(sample[None])
        return read
