"""What the precision of a case decides: the types of weights and gradients, and in fp16 the scale of the loss."""

from envbuild_smoke.plan.axes import Precision
from envbuild_smoke.plan.models import Case

# Of fp16: from where the scale of the loss grows, and after how many steps it doubles. Megatron-LM's 2**32 and 1000
# would begin with steps that are left out, and never double.
INITIAL_LOSS_SCALE = 4096.0
LOSS_SCALE_WINDOW = 2
# Under fp8 weights are in bfloat16: Transformer Engine casts them for each product.
_WEIGHTS: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def weights_dtype(case: Case) -> str:
    """Return torch's name of the type that weights are in."""
    return _WEIGHTS[case.precision]


def gradients_dtype(case: Case) -> str:
    """Return torch's name of the type in which gradients are summed and reduced."""
    return "float32" if case.settings.grad_reduce_in_fp32 else weights_dtype(case)


def last_loss_scale(case: Case) -> float:
    """Return the scale of the loss after all steps of a case, of which none is left out; 1 but in fp16."""
    if case.precision != "fp16":
        return 1.0
    if case.settings.loss_scale is not None:
        return case.settings.loss_scale
    return float(INITIAL_LOSS_SCALE * 2 ** (case.training.steps // LOSS_SCALE_WINDOW))
