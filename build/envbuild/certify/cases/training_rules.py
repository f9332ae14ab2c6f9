"""The rules of a training's schedule and optimizer: what megatron-core asserts (optimizer_param_scheduler.py)."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.certify.cases.case import ResolvedRow


def schedule_needs(row: ResolvedRow) -> Iterator[str]:
    """That a warm-up ends before the decay does, and that rates grow in the one and fall in the other."""
    training = row.case.training
    if training.lr_warmup_iters >= training.decay_steps:
        yield f"lr_warmup_iters {training.lr_warmup_iters} must be less than lr_decay_iters {training.decay_steps}"
    rates = {name: getattr(training, name) for name in ("learning_rate", "decoupled_lr")}
    for name, most in rates.items():
        for least in ("min_lr", "lr_warmup_init"):
            if most is not None and getattr(training, least) > most:
                yield f"{least} {getattr(training, least):g} must be at most {name} {most:g}"
    if training.lr_decay_style == "WSD" and (training.lr_wsd_decay_iters or training.decay_steps) >= (
        training.decay_steps - training.lr_warmup_iters
    ):
        yield "lr_decay_style = WSD needs lr_wsd_decay_iters, fewer than there are after the warm-up"
    first, constant = training.start_weight_decay, training.weight_decay_incr_style == "constant"
    if (first is None) is not constant:
        yield "start_weight_decay and a weight_decay_incr_style other than constant need each other"
    if first is not None and first > training.weight_decay:
        yield f"start_weight_decay {first:g} must be at most weight_decay {training.weight_decay:g}"


def fusion_needs(row: ResolvedRow) -> Iterator[str]:
    """That what is fused is there, and computes what is not fused."""
    settings, model = row.case.settings, row.model
    gated = model.kind == "gpt" and model.normalization == "RMSNorm"
    if settings.bias_activation_fusion and not gated:
        # Of GELU the fused one is the approximation by tanh, which is another function.
        yield "bias_activation_fusion needs normalization RMSNorm and a model of kind gpt (a gated MLP)"
    if settings.apply_rope_fusion and not gated:
        yield "apply_rope_fusion needs normalization RMSNorm and a model of kind gpt (rotary positions)"
    module = settings.recompute
    if module in ("moe", "moe_act", "shared_experts") and model.moe is None:
        yield f"recompute = {module} needs a model with experts (moe)"
    if module == "moe_act" and not settings.moe_grouped_gemm:
        yield "recompute = moe_act needs moe_grouped_gemm"
    if module == "mlp" and model.moe is not None:
        yield "recompute = mlp needs a model without experts"
    if module == "mlp" and (not gated or model.architecture.add_bias_linear):
        # The last bias is returned from the part that is recomputed, and becomes a result of it: no step ends, and
        # memory grows (megatron-core 0.16.1, on CPUs and an H100).
        yield "recompute = mlp needs linear layers without biases"
    if module in ("mla_up_proj", "shared_experts"):
        yield f"recompute = {module} needs a model that has it"
