"""Random rows of matrices for property tests: most of their values fit each other, and any may not."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import MatrixRow
from envbuild.catalog.model_spec import MambaLayers, ModelSpec
from envbuild.certify.cases.case import Capabilities, ResolvedRow
from envbuild_smoke.plan.architecture import Moe
from envbuild_smoke.plan.axes import AttentionBackend, LossMask, Precision, Recompute, Training
from envbuild_smoke.plan.models import LayerSpec, Normalization

TRAINING = Training(steps=5, micro_batch_size=2, global_batch_size=16, learning_rate=0.001, clip_grad_norm=1.0, seed=1)
PACKAGES = frozenset({"einops", "transformer-engine", "flash-attn", "mamba-ssm"})
CAPABILITIES = (
    Capabilities(device=Device.CPU),
    *(Capabilities(device=Device.CUDA, sm=(sm,), packages=PACKAGES) for sm in ("80", "90", "100a")),
)


def values_of(**row: object) -> dict[str, object]:
    """The values of a row that is one case."""
    (values,) = MatrixRow.model_validate({"model": "m"} | row).specs()
    return values


WIDE = st.sampled_from([1, 2, 3, 4, 8])
# What fields of a row, its model, its experts and its Mamba layers may be in place of what fits.
ANY: dict[str, dict[str, st.SearchStrategy]] = {
    "spec": {
        **dict.fromkeys(("data", "tensor", "pipeline", "virtual_pipeline", "context", "expert"), WIDE),
        "sequence": st.booleans(),
        "precision": st.sampled_from(get_args(Precision)),
        "micro_batch_size": st.sampled_from([1, 2, 3, 4]),
        "global_batch_size": st.sampled_from([4, 6, 8]),
        "overlap_p2p_comm": st.booleans(),
        "attention_backend": st.sampled_from(get_args(AttentionBackend)),
        "distributed_optimizer": st.booleans(),
        "overlap_grad_reduce": st.booleans(),
        "overlap_param_gather": st.booleans(),
        "bucket_size": st.sampled_from([None, 1000]),
        "loss_mask": st.sampled_from(get_args(LossMask)),
        "calculate_per_token_loss": st.booleans(),
        "expert_tensor": st.sampled_from([None, 1, 2]),
        "parallel_output": st.booleans(),
        "continue_in": st.sampled_from([None, {"data": 2}, {"tensor": 2}, {"pipeline": 2}]),
        "continue_nodes": st.sampled_from([None, 1, 2]),
        "recompute": st.sampled_from(get_args(Recompute)),
        "resume_at": st.sampled_from([1, 4, 5, 9]),
        "packed": st.booleans(),
        "moe_grouped_gemm": st.booleans(),
        "compare_weights": st.booleans(),
    },
    "model": {
        "num_layers": st.sampled_from([1, 3, 4, 6, 16]),
        "hidden_size": st.sampled_from([64, 72, 96, 130, 256]),
        "num_attention_heads": st.sampled_from([1, 2, 3, 4, 6, 16]),
        "num_query_groups": st.sampled_from([None, 1, 2, 3, 8]),
        "sequence_length": st.sampled_from([6, 8, 24, 32, 36]),
        "vocabulary_size": st.sampled_from([33, 34, 36, 512]),
        "normalization": st.sampled_from(get_args(Normalization)),
        "layer_spec": st.sampled_from(get_args(LayerSpec)),
    },
    "moe": {"num_experts": st.sampled_from([2, 3, 4, 6]), "router_topk": st.sampled_from([2, 3, 5])},
    "mamba": {
        "hybrid_override_pattern": st.sampled_from(["M", "M*", "M*M-M*M-", "M*M-M*M-M"]),
        "state_dim": st.sampled_from([8, 16, 20, 3]),
        "head_dim": st.sampled_from([8, 16, 24, 64, 128]),
        "num_groups": st.sampled_from([1, 2, 3, 4, 8]),
    },
}


@st.composite
def rows(draw: st.DrawFn) -> ResolvedRow:
    """A row, its model, and what it runs on: one that can be run, with up to three values changed at will."""
    capabilities = draw(st.sampled_from(CAPABILITIES))
    engine = capabilities.device is Device.CUDA and draw(st.booleans())
    kind = draw(st.sampled_from(["gpt", "moe", *(["mamba"] if engine else [])]))
    parts = {"spec": draw(_specs(capabilities, kind, engine=engine)), "model": draw(_models(kind, engine=engine))}
    if kind != "gpt":
        parts[kind] = {"moe": EXPERTS, "mamba": MAMBA}[kind].copy()
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        part = draw(st.sampled_from(sorted(parts)))
        field = draw(st.sampled_from(sorted(ANY[part])))
        parts[part][field] = draw(ANY[part][field])
    moe = Moe(**parts["moe"]) if "moe" in parts else None
    mamba = MambaLayers(**parts["mamba"]) if "mamba" in parts else None
    model = ModelSpec(**parts["model"], moe=moe, mamba=mamba)
    values = values_of(**parts["spec"])
    return ResolvedRow(values=values, model=model, matrix_training=TRAINING, capabilities=capabilities)


EXPERTS: dict[str, Any] = {"num_experts": 4, "router_topk": 2}
MAMBA: dict[str, Any] = {"hybrid_override_pattern": "M*M-M*M-", "state_dim": 16, "head_dim": 16, "num_groups": 4}


@st.composite
def _specs(draw: st.DrawFn, capabilities: Capabilities, kind: str, *, engine: bool) -> dict[str, Any]:
    """Axes that fit together, on what it runs on and with such a model."""
    fp8 = ["fp8"] if engine and capabilities.sm != ("80",) else []
    precision = draw(st.sampled_from(["fp32", *(["bf16"] if engine else []), *fp8]))
    tensor, data, pipeline = (draw(st.sampled_from([1, 2])) for _ in range(3))
    context = draw(st.sampled_from([1, 2])) if engine and precision != "fp32" else 1
    shared = data * context > 1
    return {
        "model": "m",
        "precision": precision,
        "data": data,
        "tensor": tensor,
        "sequence": tensor > 1 and (kind == "moe" or draw(st.booleans())),
        "pipeline": pipeline,
        "virtual_pipeline": draw(st.sampled_from([1, 2])) if pipeline > 1 and kind != "mamba" else 1,
        "context": context,
        "expert": draw(st.sampled_from([1, data * context])) if kind == "moe" else 1,
        "distributed_optimizer": shared and draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective"])),
        "resume_at": draw(st.sampled_from([None, 3])),
    }


@st.composite
def _models(draw: st.DrawFn, kind: str, *, engine: bool) -> dict[str, Any]:
    """A model that the axes above divide."""
    return {
        "kind": "mamba-hybrid" if kind == "mamba" else "gpt",
        "num_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": draw(st.sampled_from([None, 2])),
        "sequence_length": 64,
        "vocabulary_size": 512,
        "normalization": "RMSNorm",
        "layer_spec": "transformer-engine" if engine else "local",
    }
