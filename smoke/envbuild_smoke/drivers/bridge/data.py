"""The forward step of Megatron-Bridge, with a record of which samples a rank has read."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.state import GlobalState

from envbuild_smoke.drivers.mcore.data import SamplesRead


class RecordedForwardStep:
    """Bridge's forward_step for language models, which keeps the samples that this rank reads."""

    def __init__(self) -> None:
        # By the chunk of the model: each reads the same rows, of one sample or of several that are packed.
        self._read: dict[int, list[list[torch.Tensor]]] = {}

    def __call__(self, state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        """Train a micro-batch; Bridge passes these by the names of `forward_step`."""
        noted = _Noted(data_iterator, self._read.setdefault(id(model), [])) if data_iterator else None
        return forward_step(state, noted, model, return_schedule_plan)

    def add_samples(self, read: SamplesRead, steps: int, per_step: int) -> None:
        """Add what this rank has read as steps of `per_step` rows; in the middle of a pipeline Bridge reads none."""
        own = next(filter(None, self._read.values()), [])
        for step in range(steps):
            read.start_step()
            for row in own[step * per_step : (step + 1) * per_step]:
                for sample in row:
                    read.add(sample[None])


class _Noted:
    """The rows of an iterator, put into `read` as they are read."""

    def __init__(self, samples: Iterator[dict[str, torch.Tensor]], read: list[list[torch.Tensor]]) -> None:
        self._samples, self._read = samples, read

    def __iter__(self) -> "_Noted":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = next(self._samples)
        self._read.extend(samples_of(batch))
        return batch


def samples_of(batch: dict[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the samples of each row of a batch: tokens, last label, and which of them count in the loss.

    Packed or padded, a sample is the same: what follows its last token that counts is left out.
    """
    ends = batch.get("cu_seqlens_q")
    for index, (tokens, labels, mask) in enumerate(
        zip(batch["tokens"], batch["labels"], batch["loss_mask"], strict=True)
    ):
        bounds = [0, len(tokens)] if ends is None else ends[index].tolist()
        parts = [(first, mask[first:end].nonzero()) for first, end in pairwise(bounds)]
        lengths = [(first, int(counted[-1]) + 1) for first, counted in parts if len(counted)]
        yield [
            torch.cat((tokens[at : at + size], labels[at + size - 1 : at + size], mask[at : at + size].long())).cpu()
            for at, size in lengths
        ]
