"""A matrix becomes cases; impossible layouts are refused with the nearest value that works."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import CaseSpec, Device, GptModel, Matrix, Precision, Training
from envbuild.certify.cases import HEAD_SIZE_MULTIPLE, Layout, _case, broken_rules, expand
from envbuild.core.errors import ConfigurationError

QUICK = Catalog.open(Path("/nonexistent")).matrix("certify-quick")
GPT = QUICK.models["gpt"]
BASELINE = CaseSpec(model="gpt")


def matrix(*cases: CaseSpec, **changes: object) -> Matrix:
    return QUICK.model_copy(update={"cases": (BASELINE, *cases), **changes})


def spec(**axes: object) -> CaseSpec:
    return CaseSpec(model="gpt", **axes)  # type: ignore[arg-type]


def gpt(**changes: int) -> GptModel:
    return GPT.model_copy(update=changes)


def training(**changes: int) -> Training:
    return QUICK.training.model_copy(update=changes)


def refused(wrong: Matrix) -> str:
    with pytest.raises(ConfigurationError, match="cannot be run") as caught:
        expand(wrong, "m", Device.CPU)
    assert caught.value.fix == "Correct envs/matrices/m.toml."
    return caught.value.why


@pytest.mark.parametrize("device", [Device.CPU, Device.CUDA])
def test_expand_shipped_matrix(device):
    cases = expand(QUICK, "certify-quick", device)
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
    cases = expand(QUICK.model_copy(update={"cases": (spec(data=2), BASELINE)}), "m", Device.CPU)
    assert [case.id for case in cases] == ["gpt-fp32-baseline", "gpt-fp32-dp2"]


@pytest.mark.parametrize(
    ("sizes", "label", "world_size"),
    [
        ((1, 1, 1, 1), "baseline", 1),
        ((2, 1, 1, 1), "dp2", 2),
        ((2, 4, 2, 3), "dp2-tp4-pp2-vp3", 16),
    ],
)
def test_layout(sizes, label, world_size):
    layout = Layout(**dict(zip(("data", "tensor", "pipeline", "virtual_pipeline"), sizes, strict=True)))
    assert (layout.label, layout.world_size) == (label, world_size)


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
    assert _case(spec(**axes)).overlap_p2p_comm is overlap


@pytest.mark.parametrize(
    ("case", "changes", "problem"),
    [
        (spec(pipeline=3), {}, "num_layers 4 must be a multiple of pipeline x virtual_pipeline = 3; the nearest is 3"),
        (
            spec(pipeline=2, virtual_pipeline=3),
            {},
            "num_layers 4 must be a multiple of pipeline x virtual_pipeline = 6; the nearest is 6",
        ),
        (spec(tensor=3), {}, "num_attention_heads 4 must be a multiple of tensor = 3; the nearest is 3"),
        (spec(tensor=3), {}, "vocabulary_size 512 must be a multiple of tensor = 3; the nearest is 513"),
        (spec(data=3), {}, "global_batch_size 16 must be a multiple of micro_batch_size x data = 6; the nearest is 18"),
        (spec(virtual_pipeline=2), {}, "virtual_pipeline needs pipeline > 1; the nearest is pipeline = 2"),
        (
            spec(pipeline=2, virtual_pipeline=2),
            {"global_batch_size": 6},
            "number of micro batches 3 must be a multiple of pipeline = 2; the nearest is 4",
        ),
        (spec(pipeline=2, virtual_pipeline=2, overlap_p2p_comm=False), {}, "needs overlap_p2p_comm"),
    ],
)
def test_broken_rule_is_named_with_the_nearest_value(case, changes, problem):
    why = refused(matrix(case, training=training(**changes)))
    assert problem in why
    assert f"cases[1] ({_case(case).id}): " in why


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 66}, "hidden_size 66 must be a multiple of num_attention_heads 4; the nearest is 64"),
        ({"hidden_size": 80}, "hidden_size / num_attention_heads is 20 and must be a multiple of 8"),
        ({"hidden_size": 80}, "the nearest hidden_size is 64"),
        ({"hidden_size": 4}, "the nearest hidden_size is 32"),
    ],
)
def test_broken_rule_of_the_model(changes, problem):
    assert problem in refused(matrix(models={"gpt": gpt(**changes)}))


sizes = st.integers(1, 600)


@given(
    hidden=sizes,
    heads=st.integers(1, 16),
    layers=st.integers(1, 64),
    vocabulary=sizes,
    batch=sizes,
    axes=st.fixed_dictionaries(dict.fromkeys(("data", "tensor", "pipeline", "virtual_pipeline"), st.integers(1, 6))),
)
def test_following_the_advice_ends_with_a_case_that_runs(hidden, heads, layers, vocabulary, batch, axes):
    """Take each nearest value in turn, as a person would."""
    model = gpt(hidden_size=hidden, num_attention_heads=heads, num_layers=layers, vocabulary_size=vocabulary)
    train = training(global_batch_size=batch)
    case = spec(**axes)
    for _ in range(12):
        problems = broken_rules(case, _case(case), model, train)
        if not problems:
            return
        what, nearest = problems[0], int(problems[0].rsplit(" ", 1)[1])
        if what.startswith("virtual_pipeline needs"):
            case = case.model_copy(update={"pipeline": nearest})
        elif what.startswith("global_batch_size"):
            train = train.model_copy(update={"global_batch_size": nearest})
        elif what.startswith("the number of micro batches"):
            size = nearest * train.micro_batch_size * case.data
            train = train.model_copy(update={"global_batch_size": size})
        else:
            name = "hidden_size" if what.startswith("hidden_size /") else what.split()[0]
            assert getattr(model, name) != nearest
            model = model.model_copy(update={name: nearest})
    pytest.fail(f"still broken: {problems}")


@given(hidden=st.integers(1, 4000), heads=st.integers(1, 64))
def test_nearest_hidden_size_is_the_nearest(hidden, heads):
    problems = broken_rules(
        BASELINE, _case(BASELINE), gpt(hidden_size=hidden, num_attention_heads=heads), QUICK.training
    )
    wanted = [p for p in problems if p.startswith(f"hidden_size {hidden} must")]
    if hidden % heads == 0:
        assert wanted == []
    else:
        nearest = int(wanted[0].rsplit(" ", 1)[1])
        assert nearest % heads == 0
        assert abs(nearest - hidden) == min(abs(m - hidden) for m in range(heads, hidden + heads + 1, heads))


def test_head_size_rule_is_that_of_the_attention_backends():
    assert HEAD_SIZE_MULTIPLE == 8


def test_case_listed_twice():
    assert refused(matrix(spec(data=2), spec(data=2))) == "cases[2]: gpt-fp32-dp2 is listed twice"


def test_case_without_its_baseline():
    wrong = QUICK.model_copy(update={"cases": (spec(data=2),)})
    assert refused(wrong) == "gpt-fp32-dp2: its baseline gpt-fp32-baseline is not among the cases"


def test_case_of_an_unknown_model():
    assert refused(matrix(CaseSpec(model="bert"))) == "cases[1]: no model 'bert' is defined; defined: gpt"


def test_case_without_a_tolerance():
    assert refused(matrix(tolerance={})) == "cases[0]: there is no [tolerance.fp32]"


def test_all_problems_are_told_at_once():
    assert len(refused(matrix(spec(data=2), spec(data=2), spec(pipeline=3), CaseSpec(model="bert"))).splitlines()) == 3


def test_matrix_for_another_device():
    with pytest.raises(ConfigurationError, match="matrix m is not for device cpu") as caught:
        expand(QUICK.model_copy(update={"devices": (Device.CUDA,)}), "m", Device.CPU)
    assert "cuda" in caught.value.why
    assert "--matrix" in caught.value.fix


def test_id_is_made_from_all_fields():
    assert _case(spec(precision=Precision.FP32, tensor=2)).id == "gpt-fp32-tp2"
