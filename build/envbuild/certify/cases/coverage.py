"""Which pairs of axes a matrix has a case for: faults often need two of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from envbuild.catalog.matrix import Matrix, MatrixRow
from envbuild.catalog.model_spec import MambaLayers, ModelSpec
from envbuild.certify.cases.case import Capabilities, Case, ResolvedRow
from envbuild.certify.cases.rules import broken_rules, missing_capabilities
from envbuild_smoke.plan.architecture import ARCHITECTURE, MOE, Architecture, Latent, Moe
from envbuild_smoke.plan.axes import TABLE, Axis, Training

# The least that a row needs to use an axis.
_ROWS: Mapping[str, Mapping[str, object]] = {name: least for axis in TABLE for name, least in axis.grid.items()}
# What a model has; a matrix without such a model has no case for it.
# The parts of a model that are axes, each with the least that uses it.
_EXPERTS = {name: least for axis in MOE for name, least in axis.grid.items()}
PARTS = {**{name: least for axis in ARCHITECTURE for name, least in axis.grid.items()}, **_EXPERTS, "mla": {}}
_ROUTER_LOSSES = {"aux_loss", "seq_aux_loss", "z_loss"}
_MODELS = (
    "norm_epsilon",
    "num_query_groups",
    "qkv_bias",
    *PARTS,
    "moe",
    *sorted(_ROUTER_LOSSES),
    "mamba",
    "transformer-engine",
)
AXES = (*_ROWS, *_MODELS)
_OF_EXPERTS = (*_EXPERTS, "expert", "expert_tensor", "moe_token_dispatcher_type", "moe_grouped_gemm")
# The steps leave room for resume_at = 1, and the samples divide by what _ROWS multiplies.
_TRAINING = Training(steps=2, micro_batch_size=2, global_batch_size=16, learning_rate=1e-3, clip_grad_norm=1.0, seed=1)
_LATENT = Latent(q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16)
State = Literal["covered", "impossible", "not covered"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two axes, and what a matrix has for both at once.

    Attributes:
        cases: the IDs of the cases that use both.
        why: why no case can; empty where one could.
    """

    axes: tuple[str, str]
    cases: tuple[str, ...] = ()
    why: str = ""

    @property
    def state(self) -> State:
        if self.cases:
            return "covered"
        return "impossible" if self.why else "not covered"


def axes_of(case: Case, model: ModelSpec) -> frozenset[str]:
    """The axes of the grid that a case uses, its baseline's included."""
    values = {**vars(case), **vars(case.layout), **vars(case.training), **vars(case.settings)}
    own = {name for axis in TABLE for name in axis.grid_names(values[axis.name])}
    # "none" is no axis of a router's losses.
    return frozenset({*own, *_features(model), *_parts(model)} & set(AXES))


def _features(model: ModelSpec) -> Iterator[str]:
    if model.norm_epsilon != ModelSpec.model_fields["norm_epsilon"].default:
        yield "norm_epsilon"
    if model.query_groups != model.num_attention_heads:
        yield "num_query_groups"
    if model.qkv_bias:
        yield "qkv_bias"
    if model.moe is not None:
        yield "moe"
        yield model.moe.router_load_balancing_type
        if model.moe.z_loss_coeff:
            yield "z_loss"
    if model.mamba is not None:
        yield "mamba"
    if model.layer_spec == "transformer-engine":
        yield "transformer-engine"


def _parts(model: ModelSpec) -> Iterator[str]:
    for table, values in ((ARCHITECTURE, model.architecture), (MOE, model.moe)):
        for axis in table if values is not None else ():
            yield from axis.grid_names(getattr(values, axis.name))
    if model.mla is not None:
        yield "mla"


def coverage(matrix: Matrix, cases: Sequence[Case], capabilities: Capabilities) -> tuple[Pair, ...]:
    """Each pair of axes: the cases that use both, the rule that forbids it, or neither.

    Two parts of a model are no pair: which of them are together is the model's. A baseline covers nothing: it is
    compared with nothing.
    """
    used = {case.id: axes_of(case, matrix.models[case.model]) for case in cases if not case.is_baseline}
    pairs = []
    for pair in itertools.combinations(AXES, 2):
        if PARTS.keys() >= set(pair):
            continue
        covering = tuple(name for name, axes in used.items() if axes.issuperset(pair))
        pairs.append(Pair(axes=pair, cases=covering, why="" if covering else _forbidden(pair, capabilities)))
    return tuple(pairs)


@cache
def _forbidden(pair: tuple[str, str], capabilities: Capabilities) -> str:
    """The rules that every row with both axes breaks, of the one that breaks the fewest; empty if one can run."""
    if {"moe", *_ROUTER_LOSSES, *_OF_EXPERTS} & set(pair) and "mamba" in pair:
        return "a model of kind mamba-hybrid has no moe here"
    for both in (("recompute_selective", "recompute_full"), ("aux_loss", "seq_aux_loss")):
        if set(both) == set(pair):
            return "a case has one or the other"
    model = _model(pair)
    reasons: list[list[str]] = []
    for values in _least_rows(pair, model):
        row = ResolvedRow(values=values, model=model, matrix_training=_TRAINING, capabilities=capabilities)
        reasons.append([*broken_rules(row), *missing_capabilities(row)])
    fewest: list[str] = min(reasons, key=len)
    return "; ".join(fewest)


def _model(pair: tuple[str, str]) -> ModelSpec:
    """A model that has what the axes need and is large enough for all of them."""
    axes = set(pair)
    mamba = MambaLayers(hybrid_override_pattern="M*M-M*M-", state_dim=16, head_dim=16, num_groups=4)
    losses = {
        "router_load_balancing_type": next(iter(axes & {"aux_loss", "seq_aux_loss"}), "none"),
        "z_loss_coeff": 1e-3 if "z_loss" in axes else 0.0,
    }
    has_experts = axes & {"moe", *_ROUTER_LOSSES, *_OF_EXPERTS}
    engine = axes & {"mamba", "fp8", "fp8_recipe", "moe_grouped_gemm", "packed", "transformer-engine"}
    return ModelSpec(
        kind="mamba-hybrid" if "mamba" in axes else "gpt",
        num_layers=8,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2 if "num_query_groups" in axes else None,
        sequence_length=64,
        vocabulary_size=512,
        # Layers of megatron-core's own take sequence parallel with RMSNorm alone (rules.py).
        normalization="RMSNorm",
        architecture=Architecture(**_values(ARCHITECTURE, axes)),  # type: ignore[arg-type]
        mla=_LATENT if "mla" in axes else None,
        layer_spec="transformer-engine" if engine else "local",
        moe=Moe(num_experts=4, router_topk=2, **losses, **_values(MOE, axes)) if has_experts else None,  # type: ignore[arg-type]
        mamba=mamba if "mamba" in axes else None,
    )


def _values(table: Iterable[Axis], names: set[str]) -> dict[str, object]:
    """The least values of the axes of a table that are named."""
    return {key: value for axis in table for name in names & set(axis.grid) for key, value in axis.grid[name].items()}


def _least_rows(pair: tuple[str, str], model: ModelSpec) -> Iterator[Mapping[str, object]]:
    """Rows that use both axes and hardly more than they need."""
    values: dict[str, object] = {"model": "m"}
    for axis in pair:
        for name, value in _ROWS.get(axis, {}).items():
            before = values.get(name)
            # Where both axes want a size, the larger one serves both.
            values[name] = max(before, value) if isinstance(before, int) and isinstance(value, int) else value
    # Transformer Engine splits contexts in 16 bits alone, and experts take tensor parallel with sequence parallel.
    engine = model.layer_spec == "transformer-engine"
    precisions = {values.get("precision", "fp32"), *(("bf16",) if engine and values.get("precision") != "fp8" else ())}
    sequences = {values.get("sequence", False), *((True,) if values.get("tensor", 1) != 1 else ())}
    for precision, sequence in itertools.product(precisions, sequences):
        row = MatrixRow.model_validate({**values, "precision": precision, "sequence": sequence})
        yield from row.specs()


def lines_of(pairs: Sequence[Pair]) -> list[str]:
    """The grid as text: how many pairs of each kind, the axes that no case has, the other pairs without a case."""
    counts = {state: sum(pair.state == state for pair in pairs) for state in ("covered", "impossible", "not covered")}
    lines = [f"pairs of axes: {', '.join(f'{count} {state}' for state, count in counts.items())}"]
    used = {axis for pair in pairs if pair.state == "covered" for axis in pair.axes}
    if unused := [axis for axis in AXES if axis not in used]:
        lines.append(f"no case has: {', '.join(unused)}")
    left = [pair.axes for pair in pairs if pair.state == "not covered" and used.issuperset(pair.axes)]
    for axis in AXES:
        others = [second for first, second in left if first == axis]
        if others:
            lines.append(f"not covered, {axis} with: {', '.join(others)}")
    return lines
