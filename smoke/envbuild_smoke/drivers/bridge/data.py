"""The forward step of Megatron-Bridge, with a record of which samples a rank has read."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.state import GlobalState

from envbuild_smoke.drivers.mcore.data import SamplesRead


class RecordedForwardStep:
    """Bridge's forward_step for language models, which keeps the samples that this rank reads."""

    def __init__(self) -> None:
        # By the chunk of the model: each reads the same samples.
        self._read: dict[int, list[torch.Tensor]] = {}

    def __call__(self, state: GlobalState, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        """Train a micro-batch; Bridge passes these by the names of `forward_step`."""
        noted = _Noted(data_iterator, self._read.setdefault(id(model), [])) if data_iterator else None
        return forward_step(state, noted, model, return_schedule_plan)

    def add_samples(self, read: SamplesRead, steps: int, per_step: int) -> None:
        """Add what this rank has read as steps of `per_step` samples; in the middle of a pipeline Bridge reads none."""
        own = next(filter(None, self._read.values()), [])
        for step in range(steps):
            read.start_step()
            for sample in own[step * per_step : (step + 1) * per_step]:
                read.add(sample[None])


class _Noted:
    """The samples of an iterator, put into `read` as they are read."""

    def __init__(self, samples: Iterator[dict[str, Any]], read: list[torch.Tensor]) -> None:
        self._samples, self._read = samples, read

    def __iter__(self) -> "_Noted":
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._samples)
        # With the last label: the whole sample, [sequence + 1].
        self._read.extend(map(_whole, batch["tokens"], batch["labels"]))
        return batch


def _whole(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.cat((tokens, labels[-1:])).cpu()
