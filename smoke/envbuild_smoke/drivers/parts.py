"""What drivers share: options by Megatron's names, the numbers of a step, and what a recipe's case cannot have."""

import math
from typing import Any

from envbuild_smoke.plan.axes import TABLE, Layout
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.results import Step

# By name, of types of a library's own: arguments of a function or class, and what checkpoints and modules hold.
Options = dict[str, Any]
State = dict[str, Any]


def parallel_sizes(layout: Layout) -> Options:
    """Return the sizes of a layout, by Megatron's names that its configurations and its process groups share."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
    }


def refuse_unsupported(case: Case, model: Model) -> None:
    """Raise ValueError for a case of another kind than the drivers of recipes train."""
    training = case.training
    finetunes = training.finetune != "none"
    values = {**vars(case.layout), **vars(training), **vars(case.settings)}
    others = [axis for axis in TABLE if case.driver not in axis.drivers and not axis.derived]
    wrong = {
        "model.recipe": model.recipe is None,
        "moe and mamba": model.moe is not None or model.mamba is not None,
        **{axis.name: values[axis.name] != axis.default for axis in others},
        "packed": training.packed and not finetunes,
        # The mean over the tokens of packed samples is that over those of unpacked ones for the whole batch alone.
        "calculate_per_token_loss": training.calculate_per_token_loss != finetunes,
    }
    named = [name for name, is_wrong in wrong.items() if is_wrong]
    if named:
        raise ValueError(f"driver {case.driver} has no cases with this {'; '.join(named)}: leave it out of the matrix")


def step_with(step: int, loss: Any, grad_norm: Any, seconds: Any) -> Step:
    """Return a step with its numbers. Raises FloatingPointError where the gradient norm is not finite."""
    if not math.isfinite(float(grad_norm)):
        raise FloatingPointError(f"step {step}: grad_norm is {float(grad_norm)}")
    return Step(step=step, loss=float(loss), grad_norm=float(grad_norm), seconds=float(seconds))
