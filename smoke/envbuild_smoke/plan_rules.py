"""What has to hold between the values of a plan.

megatron-core would refuse most of these sizes too, or take them and fail later, in every rank at once and
less clearly.
"""

from envbuild_smoke.fields import names
from envbuild_smoke.plan import Case, Device, Model, Plan, PlanError

# What attention kernels accept: Qwen2.5-7B's 28 heads on a hidden size of 128 (4 each) find no backend.
HEAD_SIZE_MULTIPLE = 8


def check_device(plan: Plan) -> None:
    """Refuse a plan for GPUs that does not say which, and one for the CPU that does."""
    if (plan.device == "cuda") == (plan.gpu is None):
        found = "null" if plan.gpu is None else "an object"
        raise PlanError(f"plan.gpu: found {found} with device {plan.device!r}; it is null on the CPU, and only there")


def check_references(plan: Plan) -> None:
    """Refuse an empty plan, repeated ids, and models and baselines that are absent or do not fit."""
    if not plan.cases:
        raise PlanError("plan.cases: empty; a plan needs at least one case")
    known: dict[str, Case] = {}
    for case in plan.cases:
        if case.id in known:
            raise PlanError(f"plan.cases: the id {case.id!r} occurs twice; ids must differ")
        if case.model not in plan.models:
            models = names(plan.models)
            raise PlanError(f"case {case.id}: model: found {case.model!r}; plan.models has {models}")
        known[case.id] = case
    baselines = [case.id for case in plan.cases if case.baseline is None]
    for case in plan.cases:
        if case.baseline is None:
            continue
        if case.baseline not in baselines:
            found = f"found {case.baseline!r}; the plan's baselines: {names(baselines)}"
            raise PlanError(f"case {case.id}: baseline: {found}")
        _check_comparable(case, known[case.baseline])


def _check_comparable(case: Case, baseline: Case) -> None:
    """Refuse a case that differs from its baseline in more than its layout: comparing would say nothing."""
    pairs = [(name, case, baseline) for name in ("model", "precision", "driver")]
    training = ("steps", "global_batch_size", "learning_rate", "clip_grad_norm", "seed")
    for name, own, other in [*pairs, *((name, case.training, baseline.training) for name in training)]:
        found, wanted = getattr(own, name), getattr(other, name)
        if found != wanted:
            raise PlanError(f"case {case.id}: {name}: found {found!r}; baseline {baseline.id} has {wanted!r}")


def check_shape(case: Case, model: Model, device: Device) -> None:
    """Refuse sizes that do not divide, and layouts that need what the case lacks."""
    _check_divisions(case, model)
    _check_needs(case, model, device)


def _check_divisions(case: Case, model: Model) -> None:
    layout, training = case.layout, case.training
    stages = layout.pipeline * layout.virtual_pipeline
    micro_batches = training.micro_batch_size * layout.data
    rules = [
        ("hidden_size", model.hidden_size, "num_attention_heads", model.num_attention_heads),
        ("num_layers", model.num_layers, "pipeline x virtual_pipeline", stages),
        ("num_attention_heads", model.num_attention_heads, "tensor", layout.tensor),
        ("vocabulary_size", model.vocabulary_size, "tensor", layout.tensor),
        ("global_batch_size", training.global_batch_size, "micro_batch_size x data", micro_batches),
    ]
    # Each context-parallel rank takes two pieces, one from either end of the sequence.
    if layout.context > 1:
        rules.append(("sequence_length", model.sequence_length, "2 x context", 2 * layout.context))
    if layout.sequence:
        own = model.sequence_length // layout.context
        rules.append(("sequence_length / context", own, "tensor", layout.tensor))
    # The interleaved schedule works through micro batches in groups of the pipeline's size.
    if layout.virtual_pipeline > 1:
        rules.append(("the number of micro batches", training.microbatches(layout), "pipeline", layout.pipeline))
    for name, size, by_name, by in rules:
        if size % by:
            raise PlanError(f"case {case.id}: {name} is {size}, which {by_name} ({by}) does not divide")
    head_size = model.hidden_size // model.num_attention_heads
    if head_size % HEAD_SIZE_MULTIPLE:
        what = f"hidden_size / num_attention_heads is {head_size}; it must be a multiple of {HEAD_SIZE_MULTIPLE}"
        raise PlanError(f"case {case.id}: {what}")


def _check_needs(case: Case, model: Model, device: Device) -> None:
    layout, settings = case.layout, case.settings
    overlap, batch = settings.overlap_p2p_comm, settings.batch_p2p_comm
    engine = model.layer_spec == "transformer-engine"
    rules = [
        (
            case.world_size == layout.world_size,
            f"world_size is {case.world_size}; data x tensor x pipeline x context is {layout.world_size}",
        ),
        (
            case.baseline is not None or layout.world_size == 1,
            "a baseline runs on one rank; its layout has more",
        ),
        (
            layout.expert == 1 or model.moe is not None,
            f"layout.expert is {layout.expert}; the model has no experts (moe)",
        ),
        (layout.virtual_pipeline == 1 or layout.pipeline > 1, "virtual_pipeline > 1 needs pipeline > 1"),
        (not layout.sequence or layout.tensor > 1, "sequence needs tensor > 1"),
        (not (overlap and batch), "overlap_p2p_comm and batch_p2p_comm are both true; at most one may be"),
        (
            not overlap or layout.pipeline == 1 or layout.virtual_pipeline > 1,
            "overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1",
        ),
        # torch's LayerNorm cannot, the driver's own RMSNorm can.
        (
            engine or not layout.sequence or model.normalization == "RMSNorm",
            "sequence needs a model with layer_spec 'transformer-engine' or normalization 'RMSNorm'",
        ),
        # megatron-core's own attention does not.
        (engine or layout.context == 1, "context > 1 needs a model with layer_spec 'transformer-engine'"),
        (not engine or device == "cuda", "layer_spec 'transformer-engine' needs device 'cuda'"),
    ]
    for holds, message in rules:
        if not holds:
            raise PlanError(f"case {case.id}: {message}")
