"""IDs, axes and arithmetic of cases; rows that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.matrices import six_layouts
from helpers.rows import CAPABILITIES

from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import Matrix, MatrixRow
from envbuild.certify.cases.case import Capabilities, Case, same_arithmetic, same_gradients
from envbuild.certify.cases.expansion import expand, expansion
from envbuild.core.errors import ConfigurationError
from envbuild_smoke.plan.axes import Layout

SIX = six_layouts()
CPU, A100, H200, _ = CAPABILITIES
BASELINE = {"model": "gpt"}


def matrix(*rows: dict, **changes: object) -> Matrix:
    cases = tuple(MatrixRow.model_validate({"model": "gpt"} | row) for row in (BASELINE, *rows))
    return SIX.model_copy(update={"cases": cases, **changes})


def case(capabilities: Capabilities = CPU, /, **row: object) -> Case:
    """The case of a row next to a baseline of its own precision and batch."""
    plain = {name: value for name, value in row.items() if name in ("precision", "global_batch_size")}
    tolerance = dict.fromkeys(("fp32", "bf16", "fp8"), SIX.tolerance["fp32"])  # type: ignore[index]
    model = SIX.models["gpt"]
    if capabilities.device is Device.CUDA:
        model = model.model_copy(update={"layer_spec": "transformer-engine"})
    rows = [row] if plain in ({}, {"global_batch_size": 16}) else [plain, row]
    made = matrix(*rows, tolerance=tolerance, models={"gpt": model})
    return expand(made, "m", capabilities)[-1]


@pytest.mark.parametrize(
    ("row", "identity", "axes"),
    [
        ({"tensor": 2}, "gpt-fp32-tp2", ("tensor",)),
        ({"data": 2, "distributed_optimizer": True}, "gpt-fp32-dp2-do", ("data", "distributed_optimizer")),
        ({"recompute": "full"}, "gpt-fp32-rc-full", ("recompute",)),
        ({"resume_at": 3}, "gpt-fp32-resume3", ("resume_at",)),
        ({"micro_batch_size": 4}, "gpt-fp32-mb4", ("micro_batch_size",)),
        ({"micro_batch_size": 2, "tensor": 2}, "gpt-fp32-tp2", ("tensor",)),
        ({"data": 2, "global_batch_size": 4}, "gpt-fp32-dp2-gb4", ("data",)),
        ({"data": 2, "global_batch_size": 16}, "gpt-fp32-dp2", ("data",)),
        ({"resume_at": 2, "global_batch_size": 4}, "gpt-fp32-gb4-resume2", ("resume_at",)),
        (
            {"data": 2, "overlap_grad_reduce": True, "bucket_size": 500},
            "gpt-fp32-dp2-ogr-bk500",
            ("data", "overlap_grad_reduce", "bucket_size"),
        ),
        (
            {"tensor": 2, "parallel_output": False, "resume_at": 2, "continue_in": {"data": 2}},
            "gpt-fp32-tp2-gathered-resume2-in-dp2",
            ("tensor", "parallel_output", "resume_at", "continue_in"),
        ),
        (
            {"data": 4, "nodes": 2, "resume_at": 2, "continue_in": {"data": 2}, "continue_nodes": 1},
            "gpt-fp32-dp4-n2-resume2-in-dp2-on-n1",
            ("data", "nodes", "resume_at", "continue_in", "continue_nodes"),
        ),
        (
            {"data": 2, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "recompute": "selective"},
            "gpt-fp32-dp2-tp2-pp2-vp2-rc-selective",
            ("data", "tensor", "pipeline", "virtual_pipeline", "recompute"),
        ),
    ],
)
def test_id_and_axes(row, identity, axes):
    made = case(**row)
    assert (made.id, made.axes) == (identity, axes)
    assert made.baseline_id == ("gpt-fp32-baseline-gb4" if row.get("global_batch_size") == 4 else "gpt-fp32-baseline")
    assert not made.is_baseline


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"weight_decay": 0.01}, "wd0.01"),
        ({"clip_grad_norm": 0.1}, "clip0.1"),
        ({"adam_beta2": 0.95, "adam_eps": 1e-8}, "b2-0.95-eps1e-08"),
        ({"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-4}, "lr-cosine-wu2-mlr0.0001"),
        ({"decoupled_lr": 5e-4}, "dlr0.0005"),
        ({"loss_mask": "uneven", "calculate_per_token_loss": True, "global_batch_size": 8}, "gb8-mask-uneven-ptl"),
    ],
)
def test_other_mathematics_have_a_baseline_of_their_own(own, words):
    cases = {made.id: made for made in expand(matrix(own, {"tensor": 2, **own}), "m", CPU)}
    assert list(cases) == ["gpt-fp32-baseline", f"gpt-fp32-baseline-{words}", f"gpt-fp32-tp2-{words}"]
    made = cases[f"gpt-fp32-tp2-{words}"]
    assert (made.compared_with, made.axes) == (f"gpt-fp32-baseline-{words}", ("tensor",))
    assert made.training == cases[f"gpt-fp32-baseline-{words}"].training
    assert {name: getattr(made.training, name) for name in own} == own


def test_id_of_layouts_and_attention_on_gpus():
    rows = {"precision": "bf16", "tensor": 2, "context": 2, "attention_backend": "fused"}
    made = case(H200, **rows)
    assert made.id == "gpt-bf16-tp2-cp2-attn-fused"
    assert made.axes == ("tensor", "context", "attention_backend")
    assert case(H200, tensor=2, attention_backend="auto").id == "gpt-fp32-tp2"
    assert case(H200, precision="bf16", packed=True).id == "gpt-bf16-baseline-packed"
    assert case(H200, precision="fp8", fp8_recipe="delayed").id == "gpt-fp8-baseline-delayed"
    labels = Layout(data=2, tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, context=2, expert=2)
    assert (labels.label, labels.world_size) == ("dp2-tp2-sp-pp2-vp2-cp2-ep2", 16)


def test_packed_fine_tuning_is_compared_with_the_unpacked_one():
    own = {"finetune": "sft", "calculate_per_token_loss": True, "precision": "bf16"}
    recipe = {"recipe": "qwen25_500m_pretrain_1gpu_h100_bf16_config", "layer_spec": "transformer-engine"}
    model = SIX.models["gpt"].model_copy(update=recipe | {"recipe": "qwen25_500m_pretrain_1gpu_h100_bf16_config"})
    rows = [own, own | {"packed": True, "data": [1, 2], "micro_batch_size": 1}, own | {"finetune": "lora"}]
    tolerance = dict.fromkeys(("fp32", "bf16"), SIX.tolerance["fp32"])  # type: ignore[index]
    training = replace(SIX.training, micro_batch_size=1, global_batch_size=8)
    made = matrix(*rows, tolerance=tolerance, models={"gpt": model}, training=training)
    cases = {case.id: case for case in expand(made.model_copy(update={"cases": made.cases[1:]}), "m", H200)}
    sft = "gpt-bf16-baseline-ptl-sft"
    assert list(cases) == [sft, "gpt-bf16-baseline-ptl-lora", "gpt-bf16-ptl-sft-packed", "gpt-bf16-dp2-ptl-sft-packed"]
    packed = cases["gpt-bf16-dp2-ptl-sft-packed"]
    assert (packed.compared_with, packed.axes, packed.micro_batches) == (sft, ("data", "packed"), 2)
    assert (cases[sft].micro_batches, same_arithmetic(packed)) == (8, False)


def test_baseline_does_not_compare_its_weights_with_themselves():
    rows = SIX.model_copy(update={"cases": (MatrixRow(model="gpt", tensor=(1, 2), compare_weights=True),)})
    assert {made.id: made.compare_weights for made in expand(rows, "m", CPU)} == {
        "gpt-fp32-baseline": False,
        "gpt-fp32-tp2": True,
    }


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"data": 2, "global_batch_size": 4}, True),
        ({"data": 2}, False),  # four micro batches a rank
        ({"data": 4, "global_batch_size": 8}, False),  # a sum of four
        ({"tensor": 2, "global_batch_size": 4}, False),
        ({"data": 2, "tensor": 2, "global_batch_size": 4}, False),
        ({"data": 2, "micro_batch_size": 8}, False),  # the baseline has smaller ones
        ({"data": 2, "global_batch_size": 4, "distributed_optimizer": True}, False),
        ({"data": 2, "global_batch_size": 4, "resume_at": 2}, False),
        ({"data": 2, "global_batch_size": 4, "recompute": "full"}, False),
    ],
)
def test_same_arithmetic(row, same):
    assert same_arithmetic(case(**row)) is same


def test_same_arithmetic_by_precision():
    assert same_arithmetic(case(H200, precision="bf16", data=2, global_batch_size=4))
    # Sums of a few numbers in bf16 are exact.
    assert same_arithmetic(case(H200, precision="bf16", data=4))
    assert not same_arithmetic(case(H200, precision="bf16", data=4), "bridge")
    assert not same_arithmetic(case(H200, precision="bf16", data=2, distributed_optimizer=True))
    assert not same_arithmetic(case(H200, precision="fp8", data=2, global_batch_size=4))


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"data": 4}, True),
        ({"data": 2, "distributed_optimizer": True, "resume_at": 2, "continue_in": {"tensor": 2}}, True),
        ({"tensor": 2}, False),
        ({"data": 2, "recompute": "full"}, False),
    ],
)
def test_same_gradients(row, same):
    assert same_gradients(case(H200, precision="bf16", **row)) is same
    assert not same_gradients(case(H200, precision="bf16", **row), "nemo")
    assert not same_gradients(case(**row))


def test_row_for_another_device_is_left_out():
    expanded = expansion(matrix({"data": 2}, {"tensor": [2, 4], "devices": ["cuda"]}), "m", CPU)
    assert [made.id for made in expanded.cases] == ["gpt-fp32-baseline", "gpt-fp32-dp2"]
    assert [(case.id, case.why) for case in expanded.left_out] == [
        ("gpt-fp32-tp2", "it is for device cuda"),
        ("gpt-fp32-tp4", "it is for device cuda"),
    ]


def test_row_for_where_it_is_possible_is_refused_when_its_shape_is_wrong():
    """Left out is only what the GPU or the packages cannot do."""
    with pytest.raises(ConfigurationError, match="cannot be run") as caught:
        expansion(matrix({"tensor": 3, "where_possible": True}), "m", CPU)
    assert "must be a multiple of tensor = 3" in caught.value.why


def test_missing_device_and_packages_are_named():
    engine = SIX.models["gpt"].model_copy(update={"layer_spec": "transformer-engine"})
    with pytest.raises(ConfigurationError) as caught:
        expansion(matrix({"tensor": 2}, models={"gpt": engine}), "m", CPU)
    assert caught.value.why.splitlines()[0] == (
        "cases[0] (gpt-fp32-baseline): layer_spec transformer-engine needs device cuda; it needs the package "
        "transformer-engine, which the environment does not have"
    )
