"""What the driver does in the middle of NeMo's pretrain: a callback of Lightning's."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from megatron.core import tensor_parallel
from nemo.lightning.pytorch.strategies.utils import init_model_parallel

from envbuild_smoke.drivers.mcore.gradients import summarize_gradients
from envbuild_smoke.drivers.nemo.limits import step_of
from envbuild_smoke.drivers.recipe_training import Chunks, PartRun, unwrapped


# Lightning passes more than is used.
# ruff: noqa: ARG002
class CaseCallback(Callback):  # type: ignore[misc]
    """Puts the weights of a case in place, and takes what NeMo measures of each step."""

    def __init__(self, run: PartRun) -> None:
        self._run, self._context = run, run.context

    def __deepcopy__(self, _memo: dict[int, Any]) -> "CaseCallback":
        # NeMo's Trainer copies what it is built with (IOMixin), and the connection to the runner cannot be copied.
        return self

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make Megatron's process groups: NeMo leaves them out where the ranks have met before (setup_distributed)."""
        init_model_parallel(pl_module)
        # NeMo does where there is a GPU (_set_random_seed).
        if not torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(self._context.case.training.seed)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the weights in place. The optimizer is there, and has copied others."""
        # A checkpoint's follow.
        if self._context.resumes_from is None:
            self._run.start(unwrapped(wrapped_chunks(trainer)))
            for optimizer in trainer.strategy.optimizers:
                optimizer.reload_model_params()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the numbers of the step from what NeMo has logged."""
        step = self._run.next_step
        self._run.steps.append(step_of(trainer.callback_metrics, step))
        # Where Lightning's and NeMo's ModelCheckpoint save.
        if self._context.saves_to is not None and step == self._context.part.until:
            trainer.save_checkpoint(self._context.saves_to)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Summarize the gradients of the first step."""
        if self._run.wants_gradients:
            self._run.gradients = summarize_gradients(wrapped_chunks(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report what was built and trained, while it is there."""
        (optimizer,) = trainer.strategy.optimizers
        self._run.finish(wrapped_chunks(trainer), optimizer.mcore_optimizer, trainer.datamodule)


def wrapped_chunks(trainer: Any) -> Chunks:
    """Return the chunks of the model on this rank, each inside of Megatron's DistributedDataParallel."""
    return [part.module for part in trainer.strategy.megatron_parallel]
