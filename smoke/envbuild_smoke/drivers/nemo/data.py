"""NeMo's mock data, or text through Megatron-Core's datasets, and a record of which samples a rank has read."""

from typing import Any

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
from torch.utils.data import DataLoader

from envbuild_smoke.drivers.mcore.data import SamplesRead
from envbuild_smoke.drivers.parts import State


class _Recorded:
    """A data module that keeps the samples that this rank was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._read: list[torch.Tensor] = []

    def _create_dataloader(self, dataset: Any, *arguments: Any, **options: Any) -> "DataLoader[Any]":
        loader: DataLoader[Any] = super()._create_dataloader(dataset, *arguments, **options)  # type: ignore[misc]
        collate = loader.collate_fn

        def noted(samples: "list[dict[str, torch.Tensor]]") -> Any:
            # With the last label: the whole sample, [sequence + 1].
            self._read.extend(torch.cat((each["tokens"], each["labels"][-1:])) for each in samples)
            return collate(samples)

        loader.collate_fn = noted
        return loader

    def add_samples(self, read: SamplesRead, steps: int, per_step: int) -> None:
        """Add what this rank has read as steps of `per_step` samples; what was fetched ahead is left out."""
        for step in range(steps):
            read.start_step()
            for sample in self._read[step * per_step : (step + 1) * per_step]:
                read.add(sample[None])


class RecordedMockData(_Recorded, MockDataModule):  # type: ignore[misc]
    """NeMo's MockDataModule, whose samples are drawn from their index.

    It goes on after a checkpoint as NeMo's PreTrainingDataModule does; MockDataModule begins with the first sample.
    """

    def state_dict(self) -> State:
        """Return what Lightning is to keep in a checkpoint."""
        return {"consumed_samples": self.trainer.global_step * self.global_batch_size}

    def load_state_dict(self, state: State) -> None:
        """Go on after the samples that were read before the checkpoint."""
        consumed = state["consumed_samples"]
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = consumed
        update_num_microbatches(consumed_samples=consumed, consistency_check=False)

    def _create_dataloader(self, dataset: Any, *arguments: Any, **options: Any) -> "DataLoader[Any]":
        # NeMo 2.7.3 passes its wish for a mask in the place of the seed (mock.py); without Transformer Engine the model
        # asks for one.
        if self.create_attention_mask and not dataset.create_attention_mask:
            dataset.attention_mask = torch.ones(1, self.seq_length, self.seq_length).tril() < 0.5
            dataset.create_attention_mask = True
        return super()._create_dataloader(dataset, *arguments, **options)


class RecordedText(_Recorded, PreTrainingDataModule):  # type: ignore[misc]
    """NeMo's PreTrainingDataModule over indexed files, as people train."""
