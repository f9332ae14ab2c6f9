"""Faults of how gradients are reduced and scaled, and of what is fused."""

from __future__ import annotations

from typing import Any

from faults.baselines import baseline_fault
from faults.cases import (
    AVERAGED,
    AVERAGED_EXPERTS,
    FUSED_ACTIVATION,
    FUSED_LOSS,
    REDUCED_IN_FP32,
    SCALED,
    SCALED_AGAIN,
)
from faults.kinds import Case, Fault, edit
from faults.library import CORE, DATA_PARALLEL, OPTIMIZER, library_fault

_EXPERTS = "                expert_gradient_scaling_factor = self.expt_dp_group.size() / self.dp_cp_group.size()\n"
# What the library itself asserts of these factors.
_ASSERTED = (
    (
        "                            gradient_scaling_factor / data_parallel_group.size()\n"
        "                            == target_gradient_scaling_factor\n"
    ),
    "                            gradient_scaling_factor > 0\n",
)


def _factors(name: str, broken: str, factors: str, case: Case, **fields: Any) -> Fault:
    changed = edit(DATA_PARALLEL, *_ASSERTED, _EXPERTS, factors)
    return library_fault(name, broken, changed, case, "parity-grad-norm", **fields)


GRADIENTS = (
    _factors(
        "averaged-twice",
        "gradients that are averaged in the collective are divided by the number of ranks before, too",
        f"{_EXPERTS}                gradient_scaling_factor = 1.0 / self.dp_cp_group.size()\n",
        AVERAGED,
    ),
    _factors(
        "experts-averaged-over-their-copies",
        "the gradients of experts are averaged over the ranks that have the same ones, and not over all",
        "                expert_gradient_scaling_factor = 1.0\n",
        AVERAGED_EXPERTS,
    ),
    library_fault(
        "reduced-in-the-type-of-the-weights",
        "gradients are summed and reduced in bf16 where float32 is asked for",
        edit(
            DATA_PARALLEL,
            "torch.float if self.ddp_config.grad_reduce_in_fp32 else param.dtype",
            "param.dtype",
        ),
        REDUCED_IN_FP32,
        "observed",
        text="gradients_dtype",
    ),
    baseline_fault(
        "loss-scale-not-undone",
        "gradients are clipped and applied with the scale of the loss still in them",
        edit(
            OPTIMIZER,
            "main_grads, self.found_inf, self.grad_scaler.inv_scale",
            "main_grads, self.found_inf, torch.ones_like(self.grad_scaler.inv_scale)",
        ),
        SCALED,
        "grad_norm of the reference",
    ),
    library_fault(
        "loss-scale-forgotten",
        "a resumed training has the scale of the loss that it began with",
        edit(
            OPTIMIZER,
            "                self.grad_scaler.load_state_dict(state_dict['grad_scaler'])\n",
            "                pass\n",
        ),
        SCALED_AGAIN,
        "observed",
        text="loss_scale",
    ),
    library_fault(
        "fused-gate-with-another-derivative",
        "the fused gate has the derivative of the sigmoid for that of SiLU",
        edit(
            f"{CORE}/fusions/fused_bias_swiglu.py",
            "        (g * torch.sigmoid(y_1) * (1 + y_1 * (1 - torch.sigmoid(y_1))) * y_2, g * F.silu(y_1)), -1\n",
            "        (g * torch.sigmoid(y_1) * y_2, g * F.silu(y_1)), -1\n",
        ),
        FUSED_ACTIVATION,
        "parity-grad-norm",
    ),
    library_fault(
        "fused-loss-without-the-mask",
        "the fused loss has a gradient for labels that another tensor-parallel rank has",
        edit(
            f"{CORE}/fusions/fused_cross_entropy.py",
            "VocabParallelCrossEntropy.prepare_gradient_calculation_operands(softmax, target_mask)\n",
            "VocabParallelCrossEntropy.prepare_gradient_calculation_operands(\n"
            "            softmax, torch.zeros_like(target_mask)\n        )\n",
        ),
        FUSED_LOSS,
        "parity-grad-norm",
    ),
)
