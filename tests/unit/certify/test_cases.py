"""A matrix becomes cases; impossible layouts are refused with the rule and the values that it allows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from helpers.matrices import six_layouts
from helpers.rows import CAPABILITIES
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import Matrix, MatrixRow
from envbuild.catalog.model_spec import ModelSpec
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case, ResolvedRow
from envbuild.certify.cases.expansion import expand
from envbuild.certify.run.plan import Environment, Network, Subject, make_plan
from envbuild.core.errors import ConfigurationError
from envbuild_smoke.plan.axes import Layout, Precision, Training
from envbuild_smoke.plan.reader import parse_plan

QUICK = six_layouts()
CATALOG = Catalog.open(Path("/nonexistent"))
GPT = QUICK.models["gpt"]
CPU = Capabilities(device=Device.CPU)
BEDS = {Device.CPU: CPU, Device.CUDA: CAPABILITIES[2]}
BASELINE = MatrixRow(model="gpt")


def matrix(*cases: MatrixRow, **changes: object) -> Matrix:
    return QUICK.model_copy(update={"cases": (BASELINE, *cases), **changes})


def spec(**axes: object) -> MatrixRow:
    return MatrixRow(model="gpt", **axes)  # type: ignore[arg-type]


def case_of(row: MatrixRow, of: Matrix = QUICK) -> Case:
    (only,) = row.specs()
    models = {**of.models, row.model: of.models.get(row.model, GPT)}  # type: ignore[dict-item]
    return ResolvedRow.from_matrix(only, of.model_copy(update={"models": models}), CPU).case


def gpt(**changes: int) -> ModelSpec:
    return GPT.model_copy(update=changes)


def training(**changes: int) -> Training:
    return replace(QUICK.training, **changes)


def refused(wrong: Matrix) -> str:
    with pytest.raises(ConfigurationError, match="cannot be run") as caught:
        expand(wrong, "m", CPU)
    assert caught.value.fix == "Correct envs/matrices/m.toml."
    return caught.value.why


@pytest.mark.parametrize("device", [Device.CPU, Device.CUDA])
def test_expand(device):
    cases = expand(QUICK, "certify-quick", BEDS[device])
    assert [(case.id, case.layout.world_size) for case in cases] == [
        ("gpt-fp32-baseline", 1),
        ("gpt-fp32-dp2", 2),
        ("gpt-fp32-tp2", 2),
        ("gpt-fp32-pp2", 2),
        ("gpt-fp32-pp2-vp2", 2),
        ("gpt-fp32-tp2-pp2", 4),
    ]
    assert {case.baseline_id for case in cases} == {"gpt-fp32-baseline"}
    assert [case.id for case in cases if case.is_baseline] == ["gpt-fp32-baseline"]


def test_expand_puts_baselines_first():
    cases = expand(QUICK.model_copy(update={"cases": (spec(data=2), BASELINE)}), "m", CPU)
    assert [case.id for case in cases] == ["gpt-fp32-baseline", "gpt-fp32-dp2"]


@given(st.lists(st.tuples(*[st.integers(1, 12)] * 4), unique=True, min_size=2, max_size=2))
def test_layouts_that_differ_have_labels_that_differ(pair):
    one, other = (Layout(data=d, tensor=t, pipeline=p, virtual_pipeline=v) for d, t, p, v in pair)
    assert one.label != other.label


@pytest.mark.parametrize(
    ("axes", "overlap"),
    [
        ({}, False),
        ({"pipeline": 2}, False),
        ({"pipeline": 2, "virtual_pipeline": 2}, True),
        ({"pipeline": 4, "virtual_pipeline": 1, "overlap_p2p_comm": True}, True),
        ({"pipeline": 4, "virtual_pipeline": 1, "overlap_p2p_comm": False}, False),
    ],
)
def test_overlap_p2p_comm_is_on_for_virtual_pipelines_unless_stated(axes, overlap):
    assert case_of(spec(**axes)).settings.overlap_p2p_comm is overlap


def test_broken_rule_is_refused_with_its_place_and_its_case():
    assert refused(matrix(spec(pipeline=3))) == (
        "cases[1] (gpt-fp32-pp3): num_layers 4 must be a multiple of pipeline x virtual_pipeline = 3 (allowed: 1, 2, 4)"
    )
    three = "must be a multiple of tensor = 3 (allowed: "
    assert refused(matrix(spec(tensor=3))) == (
        f"cases[1] (gpt-fp32-tp3): num_attention_heads 4 {three}1, 2, 4); "
        f"vocabulary_size 512 {three}1, 2, 4, 8, 16, 32, 64)"
    )


SUBJECT = Subject(name="n", stack="s", base="b", target="t", lock_digest="")
LARGEST = {
    "steps": 100_000,
    "micro_batch_size": 3,
    "global_batch_size": 65520,
    "learning_rate": 1e300,
    "clip_grad_norm": 1e300,
    "seed": 2**32 - 1,
}
LONG = "x" * 106


@pytest.mark.parametrize("device", Device)
@pytest.mark.parametrize(
    "drawn",
    [
        *(CATALOG.matrix(name) for name in CATALOG.names("matrices")),
        QUICK.model_copy(
            update={
                "time_limit_seconds": 604_800,
                "training": replace(QUICK.training, **LARGEST),
                "models": {LONG: gpt(hidden_size=65536, sequence_length=131072, num_layers=16)},
                "cases": tuple(MatrixRow(model=LONG, data=data) for data in (1, 2)),
            }
        ),
    ],
    ids=[*CATALOG.names("matrices"), "largest"],
)
def test_smoke_reads_every_plan(drawn, device):
    environment = Environment(capabilities=BEDS[device], driver=Driver.MCORE)
    cases = expand(drawn, "m", BEDS[device])
    plan = make_plan(SUBJECT, environment, drawn, cases, network=Network(nodes=max(case.most_nodes for case in cases)))
    assert [case.id for case in parse_plan(json.dumps(plan).encode()).cases] == [case.id for case in cases]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        *(("training", name, 10**23) for name in ("steps", "micro_batch_size", "global_batch_size", "seed")),
        ("training", "seed", 2**32),
        ("training", "steps", 100_001),
        *(("gpt", name, 10**23) for name in sorted(set(ModelSpec.model_fields) - {"kind"})),
        ("gpt", "vocabulary_size", 1),
        ("gpt", "vocabulary_size", 31),
        *(("case", axis, 10**23) for axis in ("data", "tensor", "pipeline", "virtual_pipeline")),
        ("matrix", "time_limit_seconds", 10**400),
    ],
)
def test_number_out_of_bounds_is_refused(part, name, value):
    whole = QUICK.model_dump(exclude_unset=True)
    table = {"training": whole["training"], "gpt": whole["models"]["gpt"], "case": whole["cases"][0], "matrix": whole}
    Matrix.model_validate(whole)
    table[part][name] = value
    with pytest.raises(ValidationError, match=name):
        Matrix.model_validate(whole)


def test_id_has_a_word_for_batched_sends_of_interleaved_stages():
    rows = [spec(pipeline=4, virtual_pipeline=2, overlap_p2p_comm=overlap) for overlap in (None, True, False)]
    why = refused(matrix(*rows, models={"gpt": gpt(num_layers=8)})).splitlines()
    assert why == [
        "cases[2]: gpt-fp32-pp4-vp2 is listed twice",
    ]
    batched = case_of(spec(pipeline=4, virtual_pipeline=2, overlap_p2p_comm=False))
    assert (batched.id, batched.axes[-1]) == ("gpt-fp32-pp4-vp2-bp2p", "overlap_p2p_comm")
    assert case_of(spec(pipeline=2, overlap_p2p_comm=False)).id == "gpt-fp32-pp2"


def test_lora_with_sequence_parallel_gathers_its_input_again_unless_stated():
    tuned = {"finetune": "lora", "tensor": 2, "precision": "bf16"}
    regathered = [
        case_of(spec(**tuned, sequence=sequence, sequence_parallel_input_regather=stated))
        for sequence, stated in ((False, None), (True, None), (True, False))
    ]
    assert [case.settings.sequence_parallel_input_regather for case in regathered] == [False, True, False]
    assert [case.id for case in regathered] == [
        "gpt-bf16-tp2-lora",
        "gpt-bf16-tp2-sp-lora",
        "gpt-bf16-tp2-sp-lora-gathered-norm",
    ]
    assert not case_of(spec(tensor=2, sequence=True)).settings.sequence_parallel_input_regather


words = st.sampled_from(["gpt", "fp32", "bf16", "baseline", "tp2", "dp2", "pp2"])
rows = st.builds(
    MatrixRow,
    model=st.lists(words, min_size=1, max_size=4).map("-".join),
    precision=st.sampled_from(get_args(Precision)),
    **dict.fromkeys(("data", "tensor", "pipeline", "virtual_pipeline"), st.integers(1, 3)),
)


@given(one=rows, other=rows)
def test_names_of_models_that_look_like_parts_of_an_id_do_not_make_ids_equal(one, other):
    assert (case_of(one).id == case_of(other).id) == (case_of(one) == case_of(other))


def test_id_is_no_longer_than_smoke_takes():
    name = "x" * 106
    expand(QUICK.model_copy(update={"models": {name: GPT}, "cases": (MatrixRow(model=name),)}), "m", CPU)
    long = QUICK.model_copy(update={"models": {name + "x": GPT}, "cases": (MatrixRow(model=name + "x"),)})
    why = refused(long)
    assert f"{name}x-fp32-baseline has 121 characters; an ID has at most 120: shorten the model's name" in why


def test_case_without_its_baseline():
    wrong = QUICK.model_copy(update={"cases": (spec(data=2),)})
    assert refused(wrong) == "gpt-fp32-dp2: its baseline gpt-fp32-baseline is not among the cases"


def test_all_problems_are_reported_at_once():
    rows = (spec(data=2), spec(data=2), spec(pipeline=3), MatrixRow(model="bert", data=(1, 2)))
    unknown = "cases[1]: no model 'bert' is defined; defined: gpt"
    assert refused(matrix(MatrixRow(model="bert", data=(1, 2)))) == unknown
    assert refused(matrix(tolerance={})) == "cases[0]: there is no [tolerance.fp32]"
    assert len(refused(matrix(*rows)).splitlines()) == 3


def test_matrix_for_another_device():
    with pytest.raises(ConfigurationError, match="matrix m is not for device cpu") as caught:
        expand(QUICK.model_copy(update={"devices": (Device.CUDA,)}), "m", CPU)
    assert "cuda" in caught.value.why
    assert "--matrix" in caught.value.fix
