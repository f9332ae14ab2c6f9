"""The grid of axis pairs: covered by a case, impossible by a rule, or neither."""

from __future__ import annotations

import pytest
from helpers.matrices import six_layouts
from helpers.rows import CAPABILITIES

from envbuild.catalog.matrix import MatrixRow
from envbuild.catalog.model_spec import ModelSpec
from envbuild.certify.cases.coverage import AXES, PARTS, Pair, coverage, lines_of
from envbuild.certify.cases.expansion import expand

CPU, _, H200, _ = CAPABILITIES
SIX = six_layouts()


def pairs_of(*rows: dict, capabilities=CPU) -> dict[tuple[str, str], Pair]:
    cases = tuple(MatrixRow.model_validate({"model": "gpt"} | row) for row in ({}, *rows))
    matrix = SIX.model_copy(update={"cases": cases})
    return {pair.axes: pair for pair in coverage(matrix, expand(matrix, "m", capabilities), capabilities)}


def test_every_pair_is_there_once():
    pairs, parts = pairs_of(), len(PARTS)
    assert len(pairs) == (len(AXES) * (len(AXES) - 1) - parts * (parts - 1)) // 2


def test_pair_is_covered_by_the_cases_that_use_both():
    pairs = pairs_of({"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, "pipeline": 2}, {"data": 2})
    assert pairs["data", "tensor"].cases == ("gpt-fp32-dp2-tp2", "gpt-fp32-dp2-tp2-pp2")
    # All cases train with weight decay, and so does their baseline, which covers nothing.
    assert pairs["data", "weight_decay"].state == "covered"
    assert pairs["resume_at", "weight_decay"].state == "not covered"


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        (("virtual_pipeline", "mamba"), "virtual_pipeline > 1 needs a model of kind gpt"),
        (("expert", "mamba"), "a model of kind mamba-hybrid has no moe here"),
        (("fp8", "recompute_full"), "layer_spec transformer-engine needs device cuda"),
        (("recompute_selective", "recompute_full"), "a case has one or the other"),
        (("aux_loss", "seq_aux_loss"), "a case has one or the other"),
        (("packed", "seq_aux_loss"), "packed needs another router_load_balancing_type than seq_aux_loss"),
    ],
)
def test_pair_is_impossible_by_a_rule(axes, why):
    pair = pairs_of()[axes]
    assert pair.state == "impossible"
    assert why in pair.why


@pytest.mark.parametrize("axes", [("tensor", "moe"), ("virtual_pipeline", "moe"), ("continue_in", "num_query_groups")])
def test_pair_that_could_run_is_not_covered(axes):
    """Also where no model of the matrix has it: another one could."""
    assert pairs_of()[axes].state == "not covered"


def test_kinds_of_recompute_and_of_router_losses_are_axes_of_their_own():
    experts = {"num_experts": 4, "router_topk": 2, "router_load_balancing_type": "seq_aux_loss", "aux_loss_coeff": 0.01}
    model = ModelSpec.model_validate({**SIX.models["gpt"].model_dump(mode="json"), "moe": experts})
    matrix = SIX.model_copy(update={"models": {"gpt": model}})
    rows = ({"model": "gpt"}, {"model": "gpt", "context": 2, "recompute": "full"})
    matrix = matrix.model_copy(update={"cases": tuple(MatrixRow.model_validate(row) for row in rows)})
    pairs = {pair.axes: pair for pair in coverage(matrix, expand(matrix, "m", CPU), CPU)}
    assert pairs["context", "seq_aux_loss"].state == pairs["context", "recompute_full"].state == "covered"
    assert pairs["context", "aux_loss"].state == pairs["context", "recompute_selective"].state == "not covered"


def test_what_a_gpu_can_do_is_not_impossible_there():
    axes = ("context", "transformer-engine")
    assert pairs_of()[axes].state == "impossible"
    engine = SIX.models["gpt"].model_copy(update={"layer_spec": "transformer-engine"})
    matrix = SIX.model_copy(update={"models": {"gpt": engine}})
    assert {pair.axes: pair for pair in coverage(matrix, (), H200)}[axes].state == "not covered"


def test_lines_count_the_pairs_and_name_those_that_are_not_covered():
    lines = lines_of(tuple(pairs_of({"data": 2, "tensor": 2}, {"pipeline": 2, "data": 2}).values()))
    assert lines[0].startswith("pairs of axes: 5 covered, ")
    assert lines[1].startswith("no case has: sequence, ")
    assert "not covered, tensor with: pipeline" in lines
