"""What has to hold between the values of a plan.

megatron-core would refuse most of these sizes too, or take them and fail later, in every rank at once and
less clearly.
"""

from envbuild_smoke.plan.fields import names
from envbuild_smoke.plan.models import Case, Model, Plan, PlanError

# Name and size, and name and size of what must divide it.
Division = tuple[str, int, str, int]

# What attention kernels accept: Qwen2.5-7B's 28 heads on a hidden size of 128 (4 each) find no backend.
HEAD_SIZE_MULTIPLE = 8
# What the tensor cores take in fp8, along every side of a product of matrices.
FP8_MULTIPLE = 16
FP8_LEAST_SM = 89
# A Mamba layer is twice as wide inside, as megatron-core makes it.
MAMBA_EXPANSION = 2


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


def check_shape(case: Case, model: Model, plan: Plan) -> None:
    """Refuse sizes that do not divide, and layouts and settings that need what the case lacks."""
    for name, size, by_name, by in [*_divisions(case, model), *_mamba_divisions(case, model)]:
        if size % by:
            raise PlanError(f"case {case.id}: {name} is {size}, which {by_name} ({by}) does not divide")
    rules = [*_model_needs(case, model, plan), *_layout_needs(case, model, plan), *_setting_needs(case, model)]
    for holds, message in rules:
        if not holds:
            raise PlanError(f"case {case.id}: {message}")
    if case.precision == "fp8":
        for name, size in _fp8_sizes(case, model):
            if size % FP8_MULTIPLE:
                raise PlanError(f"case {case.id}: {name} is {size}; fp8 takes multiples of {FP8_MULTIPLE}")


def _divisions(case: Case, model: Model) -> list[Division]:
    layout, training = case.layout, case.training
    heads, groups = model.num_attention_heads, model.num_query_groups
    stages = layout.pipeline * layout.virtual_pipeline
    micro_batches = training.micro_batch_size * layout.data
    rules = [
        ("hidden_size", model.hidden_size, "num_attention_heads", heads),
        ("num_attention_heads", heads, "num_query_groups", groups),
        ("num_layers", model.num_layers, "pipeline x virtual_pipeline", stages),
        ("num_attention_heads", heads, "tensor", layout.tensor),
        ("num_query_groups", groups, "tensor", layout.tensor),
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
    if model.moe is not None:
        rules.append(("data x context", layout.data * layout.context, "expert", layout.expert))
        rules.append(("num_experts", model.moe.num_experts, "expert", layout.expert))
    return rules


def _mamba_divisions(case: Case, model: Model) -> list[Division]:
    mamba, layout = model.mamba, case.layout
    if mamba is None:
        return []
    inner = MAMBA_EXPANSION * model.hidden_size
    heads, groups = inner // mamba.head_dim, mamba.num_groups // layout.tensor
    # Fewer groups than context-parallel ranks are copied to each, and then they must divide the ranks.
    larger, smaller = max(groups, layout.context), max(min(groups, layout.context), 1)
    return [
        (f"{MAMBA_EXPANSION} x hidden_size", inner, "mamba.head_dim", mamba.head_dim),
        ("the number of Mamba heads", heads, "tensor x context", layout.tensor * layout.context),
        ("the number of Mamba heads", heads, "mamba.num_groups", mamba.num_groups),
        ("mamba.num_groups", mamba.num_groups, "tensor", layout.tensor),
        ("the larger of mamba.num_groups / tensor and context", larger, "the smaller", smaller),
    ]


def _fp8_sizes(case: Case, model: Model) -> list[tuple[str, int]]:
    """The sides of the matrices that fp8 multiplies, on one rank; called where they are whole."""
    layout, mamba = case.layout, model.mamba
    parts = layout.context * (layout.tensor if layout.sequence else 1)
    sizes = [
        ("hidden_size / tensor", model.hidden_size // layout.tensor),
        ("tokens of a micro batch on a rank", model.sequence_length // parts * case.training.micro_batch_size),
    ]
    if mamba is not None:
        inner = MAMBA_EXPANSION * model.hidden_size
        width = 2 * inner + 2 * mamba.num_groups * mamba.state_dim + inner // mamba.head_dim
        sizes.append(("the width of a Mamba layer's input projection / tensor", width // layout.tensor))
    return sizes


def _layout_needs(case: Case, model: Model, plan: Plan) -> list[tuple[bool, str]]:
    layout, settings = case.layout, case.settings
    overlap, batch = settings.overlap_p2p_comm, settings.batch_p2p_comm
    local = model.layer_spec == "local"
    return [
        (
            case.world_size == layout.world_size,
            f"world_size is {case.world_size}; data x tensor x pipeline x context is {layout.world_size}",
        ),
        (case.baseline is not None or layout.world_size == 1, "a baseline runs on one rank; its layout has more"),
        (layout.virtual_pipeline == 1 or layout.pipeline > 1, "virtual_pipeline > 1 needs pipeline > 1"),
        (not layout.sequence or layout.tensor > 1, "sequence needs tensor > 1"),
        (not (overlap and batch), "overlap_p2p_comm and batch_p2p_comm are both true; at most one may be"),
        (
            not overlap or layout.pipeline == 1 or layout.virtual_pipeline > 1,
            "overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1",
        ),
        # torch's LayerNorm cannot, the driver's own RMSNorm can.
        (
            not (local and layout.sequence) or model.normalization == "RMSNorm",
            "sequence needs a model with layer_spec 'transformer-engine' or normalization 'RMSNorm'",
        ),
        # megatron-core's own attention does not; the driver's does, slowly, to have this layout on a CPU.
        (
            not local or layout.context == 1 or plan.device == "cpu",
            "context > 1 needs a model with layer_spec 'transformer-engine', or device 'cpu'",
        ),
        (
            not settings.distributed_optimizer or layout.data * layout.context > 1,
            "distributed_optimizer needs data x context > 1",
        ),
    ]


def _setting_needs(case: Case, model: Model) -> list[tuple[bool, str]]:
    backend, local = case.settings.attention_backend, model.layer_spec == "local"
    fp32 = case.precision == "fp32"
    return [
        (
            local == (backend == "local"),
            f"attention_backend {backend!r} does not go with layer_spec {model.layer_spec!r} ('local' with 'local')",
        ),
        (not fp32 or backend not in ("flash", "fused"), f"attention_backend {backend!r} needs precision bf16 or fp8"),
        (
            case.layout.context == 1 or local or not (fp32 or backend == "unfused"),
            "context > 1 needs precision bf16 or fp8 and an attention_backend other than 'unfused'",
        ),
        (case.precision != "fp8" or not local, "precision fp8 needs a model with layer_spec 'transformer-engine'"),
        (
            case.resume_at is None or case.resume_at < case.training.steps,
            f"resume_at is {case.resume_at}; it must be less than training.steps ({case.training.steps})",
        ),
        (
            case.baseline is not None or (case.resume_at is None and not case.compare_weights),
            "a baseline neither resumes nor compares its weights",
        ),
    ]


def _model_needs(case: Case, model: Model, plan: Plan) -> list[tuple[bool, str]]:
    layout, moe, mamba = case.layout, model.moe, model.mamba
    head_size = model.hidden_size // model.num_attention_heads
    old = [sm for sm in (plan.gpu.sm if plan.gpu else ()) if int(sm.rstrip("af")) < FP8_LEAST_SM]
    rules = [
        (
            head_size % HEAD_SIZE_MULTIPLE == 0,
            f"hidden_size / num_attention_heads is {head_size}; it must be a multiple of {HEAD_SIZE_MULTIPLE}",
        ),
        (model.layer_spec == "local" or plan.device == "cuda", "layer_spec 'transformer-engine' needs device 'cuda'"),
        (
            case.precision != "fp8" or not old,
            f"precision fp8 needs GPUs of SM {FP8_LEAST_SM} or newer; plan.gpu.sm has {', '.join(old)}",
        ),
        (
            (model.kind == "mamba-hybrid") == (mamba is not None),
            f"model {case.model}: kind 'mamba-hybrid' has an object mamba, and no other kind has one",
        ),
        (moe is None or mamba is None, f"model {case.model}: a model of kind 'mamba-hybrid' has no moe"),
        (layout.expert == 1 or moe is not None, f"layout.expert is {layout.expert}; the model has no experts (moe)"),
    ]
    if moe is not None:
        least = f"moe.router_topk is {moe.router_topk}; it must be 2 or more, and at most num_experts {moe.num_experts}"
        rules += [
            (2 <= moe.router_topk <= moe.num_experts, least),
            (layout.tensor == 1 or layout.sequence, "tensor > 1 with experts needs sequence"),
        ]
    if mamba is not None:
        letters = len(mamba.hybrid_override_pattern)
        count = f"mamba.hybrid_override_pattern has {letters} letters; num_layers is {model.num_layers}"
        rules += [
            (model.layer_spec == "transformer-engine", "kind 'mamba-hybrid' needs layer_spec 'transformer-engine'"),
            (letters == model.num_layers, count),
            (layout.virtual_pipeline == 1, "virtual_pipeline > 1 needs a model of kind 'gpt'"),
            (case.settings.recompute != "full", "recompute 'full' needs a model of kind 'gpt'"),
        ]
    return rules
