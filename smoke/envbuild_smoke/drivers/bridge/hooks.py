"""What the driver does in the middle of Megatron-Bridge's pretrain: a callback of its own kind."""

import time
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from envbuild_smoke.drivers.bridge.data import RecordedForwardStep
from envbuild_smoke.drivers.bridge.hugging_face import compare_with_hugging_face
from envbuild_smoke.drivers.mcore.gradients import summarize_gradients
from envbuild_smoke.drivers.parts import step_with
from envbuild_smoke.drivers.recipe_training import PartRun, unwrapped

LOSS = "lm loss"


class CaseCallback(Callback):  # type: ignore[misc]
    """Puts the weights of a case in place, and takes what Bridge measures of each step."""

    def __init__(self, run: PartRun, read: RecordedForwardStep) -> None:
        self._run, self._read, self._began = run, read, 0.0

    def on_train_start(self, context: CallbackContext) -> None:
        """Compare with Hugging Face what Bridge has imported, and put the weights in place.

        The optimizer is there, and has copied others.
        """
        model_folder = context.state.cfg.checkpoint.pretrained_checkpoint
        run, is_first = self._run, self._run.context.resumes_from is None
        if not run.is_moved and is_first and model_folder is not None:
            chunks = unwrapped(context.model)
            run.hugging_face = compare_with_hugging_face(chunks, Path(model_folder), run.context.case)
        if is_first:
            run.start(unwrapped(context.model))
            context.optimizer.reload_model_params()
        if run.wants_gradients:
            self._summarize_first_gradients(context)

    def _summarize_first_gradients(self, context: CallbackContext) -> None:
        """Look at the gradients as the optimizer gets them: Bridge calls nobody then."""
        optimizer, model, run = context.optimizer, context.model, self._run
        original = optimizer.step

        def step() -> Any:
            run.gradients = summarize_gradients(model)
            optimizer.step = original
            return original()

        optimizer.step = step

    def on_train_step_start(self, context: CallbackContext) -> None:  # noqa: ARG002
        """Begin to measure."""
        self._began = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Take the numbers of the step; its gradient norm is on the CPU, so the GPU has done it."""
        seconds, step = time.perf_counter() - self._began, self._run.next_step
        if context.skipped_iter:
            raise FloatingPointError(f"step {step}: Megatron-Bridge skipped it")
        # The ranks before the last stage are told none, and report none.
        loss = context.loss_dict.get(LOSS, 0.0)
        self._run.steps.append(step_with(step, loss, context.grad_norm, seconds))
        if step == self._run.context.part.until:
            # The loop looks at it before each step, and ends as after its last one: `exit_interval` ends the process.
            context.state.cfg.train.train_iters = step

    def on_train_end(self, context: CallbackContext) -> None:
        """Report what was built and trained, while it is there."""
        self._run.finish(context.model, context.optimizer, self._read)
