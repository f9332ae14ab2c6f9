"""What the driver does in the middle of NeMo's pretrain: a callback of Lightning's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from megatron.core import tensor_parallel
from megatron.core.transformer.module import Float16Module
from nemo.lightning.pytorch.strategies.utils import init_model_parallel

from envbuild_smoke.drivers.mcore.gradients import summarize_gradients
from envbuild_smoke.drivers.nemo.limits import Part, step_of

Chunks = list[torch.nn.Module]


# Lightning passes more than is used.
# ruff: noqa: ARG002
class CaseCallback(Callback):  # type: ignore[misc]
    """Puts the weights of a case in place, and takes what NeMo measures of each step.

    `start` gets the chunks of the model once they are built, and returns true if it has changed them; `end` gets them
    when they are trained, each inside of Megatron's DistributedDataParallel, the optimizer, and the data module.
    `steps` has those of the parts before.
    """

    def __init__(
        self,
        part: Part,
        start: Callable[[Chunks], bool],
        end: Callable[[Chunks, Any, Any], None],
        steps: Iterable[dict[str, Any]] = (),
    ) -> None:
        self._part, self._start, self._end = part, start, end
        self.steps = list(steps)
        # Of the part's first step, by `summarize_gradients`.
        self.gradients: list[dict[str, Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make Megatron's process groups: NeMo leaves them out where the ranks have met before (setup_distributed)."""
        init_model_parallel(pl_module)
        # NeMo does where there is a GPU (_set_random_seed).
        if not torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(self._part.case.training.seed)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the weights in place. The optimizer is there, and has copied others."""
        # A checkpoint's follow.
        if self._part.resumes_from is None and self._start(unwrapped(wrapped_chunks(trainer))):
            for optimizer in trainer.strategy.optimizers:
                optimizer.reload_model_params()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the numbers of the step from what NeMo has logged."""
        self.steps.append(step_of(trainer.callback_metrics, len(self.steps) + 1))
        # Where Lightning's and NeMo's ModelCheckpoint save.
        if self._part.saves_to is not None and len(self.steps) == self._part.until:
            trainer.save_checkpoint(self._part.saves_to)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Summarize the gradients of the first step."""
        if not self.gradients:
            self.gradients = summarize_gradients(wrapped_chunks(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report what was built and trained, while it is there."""
        if len(self.steps) != self._part.until:
            raise RuntimeError(f"NeMo trained {len(self.steps)} steps, where the case has {self._part.until}")
        (optimizer,) = trainer.strategy.optimizers
        self._end(wrapped_chunks(trainer), optimizer.mcore_optimizer, trainer.datamodule)


def wrapped_chunks(trainer: Any) -> Chunks:
    """Return the chunks of the model on this rank, each inside of Megatron's DistributedDataParallel."""
    return [part.module for part in trainer.strategy.megatron_parallel]


def unwrapped(wrapped: Chunks) -> Chunks:
    """Return the chunks of the model without what Megatron wraps them in."""
    inner: Chunks = [chunk.module for chunk in wrapped]
    return [chunk.module if isinstance(chunk, Float16Module) else chunk for chunk in inner]
