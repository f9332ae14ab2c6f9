"""A matrix becomes cases; impossible layouts are refused with the nearest value that works."""

import json
import re

import pytest
from helpers.matrices import six_layouts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from envbuild.catalog.models import CaseRow, Device, Driver, Matrix, ModelSpec, Precision, Training
from envbuild.certify.cases import Case, Layout, ResolvedRow, expand
from envbuild.certify.cases.capabilities import Capabilities
from envbuild.certify.cases.rules import HEAD_SIZE_MULTIPLE, broken_rules
from envbuild.certify.run.plan import Expected, Subject, make_plan
from envbuild.core.errors import ConfigurationError
from envbuild_smoke.plan.reader import parse_plan

QUICK = six_layouts()
GPT = QUICK.models["gpt"]
CPU = Capabilities(device=Device.CPU)
BEDS = {Device.CPU: CPU, Device.CUDA: Capabilities(device=Device.CUDA, sm=("90",))}
BASELINE = CaseRow(model="gpt")


def matrix(*cases: CaseRow, **changes: object) -> Matrix:
    return QUICK.model_copy(update={"cases": (BASELINE, *cases), **changes})


def spec(**axes: object) -> CaseRow:
    return CaseRow(model="gpt", **axes)  # type: ignore[arg-type]


def case_of(row: CaseRow, of: Matrix = QUICK) -> Case:
    (only,) = row.specs()
    models = {**of.models, row.model: of.models.get(row.model, GPT)}  # type: ignore[dict-item]
    return ResolvedRow.of(only, of.model_copy(update={"models": models}), CPU).case


def gpt(**changes: int) -> ModelSpec:
    return GPT.model_copy(update=changes)


def training(**changes: int) -> Training:
    return QUICK.training.model_copy(update=changes)


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
    assert case_of(spec(**axes)).overlap_p2p_comm is overlap


THREE = "must be a multiple of tensor = 3"
BATCHED = (
    "virtual_pipeline with pipeline = 2 needs overlap_p2p_comm (with batched sends the next and the previous stage are "
    "one rank, and activations are taken for gradients: it trains, and it is wrong)"
)
PARTS = re.compile(r"cases\[(\d+)\] \(\S+\): (.*); the nearest that satisfies all rules: (.*)")


def told(wrong: Matrix) -> dict[int, tuple[str, str]]:
    """The rules and the advice told, by the position of the case."""
    found = (PARTS.fullmatch(line) for line in refused(wrong).splitlines())
    return {int(match[1]): (match[2], match[3]) for match in found if match}


@pytest.mark.parametrize(
    ("case", "changes", "rules", "nearest"),
    [
        (
            spec(pipeline=3),
            {},
            "num_layers 4 must be a multiple of pipeline x virtual_pipeline = 3",
            "pipeline = 2",
        ),
        (
            spec(pipeline=2, virtual_pipeline=3),
            {},
            "num_layers 4 must be a multiple of pipeline x virtual_pipeline = 6",
            "virtual_pipeline = 2",
        ),
        # Not 3 heads: 64 is no multiple of 3.
        (
            spec(tensor=3),
            {},
            f"num_attention_heads 4 {THREE}; vocabulary_size 512 {THREE}",
            "tensor = 2",
        ),
        (spec(data=3), {}, "global_batch_size 16 must be a multiple of micro_batch_size x data = 6", "data = 2"),
        (spec(virtual_pipeline=2), {}, "virtual_pipeline needs pipeline > 1", "pipeline = 2"),
        (
            spec(pipeline=2, virtual_pipeline=2),
            {"global_batch_size": 6},
            "the number of micro batches 3 must be a multiple of pipeline = 2",
            "global_batch_size = 4",
        ),
        (
            spec(pipeline=2, virtual_pipeline=2, overlap_p2p_comm=False),
            {},
            BATCHED,
            "overlap_p2p_comm = true",
        ),
        (
            spec(pipeline=2, overlap_p2p_comm=True),
            {},
            "overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1",
            "overlap_p2p_comm = false",
        ),
    ],
)
def test_broken_rule_is_named_with_the_nearest_value(case, changes, rules, nearest):
    assert told(matrix(case, training=training(**changes))) == {1: (rules, nearest)}


@pytest.mark.parametrize(
    ("changes", "rule", "nearest"),
    [
        ({"hidden_size": 66}, "hidden_size 66 must be a multiple of num_attention_heads 4", "hidden_size = 64"),
        (
            {"hidden_size": 80},
            "hidden_size / num_attention_heads is 20 and must be a multiple of 8 (no attention backend takes others)",
            "hidden_size = 64",
        ),
        (
            {"hidden_size": 4},
            "hidden_size / num_attention_heads is 1 and must be a multiple of 8 (no attention backend takes others)",
            "hidden_size = 32",
        ),
    ],
)
def test_broken_rule_of_the_model(changes, rule, nearest):
    assert told(matrix(models={"gpt": gpt(**changes)})) == {0: (rule, nearest)}


def test_nearest_layout_is_not_one_that_the_matrix_has():
    assert told(matrix(spec(tensor=2), spec(tensor=3)))[2][1] == "tensor = 4"


def test_nearest_of_a_case_whose_id_is_another_s():
    wrong = matrix(spec(pipeline=2), spec(pipeline=2, overlap_p2p_comm=True))
    assert told(wrong)[2][1] == "virtual_pipeline = 2"


def test_two_cases_are_not_sent_to_the_same_layout():
    advice = told(matrix(spec(pipeline=3), spec(pipeline=5)))
    assert [advice[position][1] for position in (1, 2)] == ["pipeline = 2", "pipeline = 4"]


def test_nearest_sizes_suit_the_other_cases():
    """No layout is left but the baseline's: the model changes, so that tensor = 2 goes on running."""
    small = gpt(num_attention_heads=2, vocabulary_size=62)
    wrong = matrix(spec(tensor=2), spec(tensor=3), models={"gpt": small})
    assert told(wrong)[2][1] == "num_attention_heads = 6, hidden_size = 48, vocabulary_size = 60"


def test_nearest_batch_of_a_baseline_suits_all_cases():
    advice = told(matrix(spec(data=2), training=training(global_batch_size=15)))
    assert {nearest for _, nearest in advice.values()} == {"global_batch_size = 16"}


def test_vocabulary_is_split_into_parts_of_at_least_two():
    wide = gpt(num_attention_heads=32, hidden_size=256, vocabulary_size=32)
    rules, nearest = told(matrix(spec(tensor=32), models={"gpt": wide}))[1]
    assert rules == "vocabulary_size 32 must be at least 2 x tensor = 64"
    assert nearest == "tensor = 16"


def test_case_that_nothing_near_makes_runnable_is_to_be_left_out():
    train = training(micro_batch_size=1024, global_batch_size=1024)
    taken = [spec(data=2), spec(data=64), spec(data=512), spec(data=1024)]
    assert "no values near it satisfy all rules: leave the case out" in refused(matrix(*taken, training=train))


sizes = st.integers(1, 12)
specs = st.builds(
    CaseRow,
    model=st.sampled_from(["gpt", "gpt-fp32", "x" * 106, "x" * 107]),
    data=sizes,
    tensor=sizes,
    pipeline=st.integers(1, 4),
    virtual_pipeline=st.integers(1, 4),
    overlap_p2p_comm=st.sampled_from([None, True, False]),
)
any_model = st.builds(
    ModelSpec,
    kind=st.just("gpt"),
    num_layers=st.integers(1, 16),
    hidden_size=st.integers(1, 600) | st.just(65536),
    num_attention_heads=st.integers(1, 12),
    sequence_length=st.integers(1, 131072),
    vocabulary_size=st.integers(32, 600),
)
fitting_model = st.builds(
    ModelSpec,
    kind=st.just("gpt"),
    num_layers=st.sampled_from([12, 24, 720]),
    hidden_size=st.sampled_from([96, 192]),
    num_attention_heads=st.sampled_from([6, 12]),
    sequence_length=st.integers(1, 131072),
    vocabulary_size=st.sampled_from([48, 512, 1680]),
)
# Most fit many layouts: where all of a matrix is broken, there is no plan to look at.
models = fitting_model | fitting_model | any_model
trainings = st.builds(
    Training,
    steps=st.integers(1, 100_000),
    micro_batch_size=st.integers(1, 3),
    global_batch_size=st.sampled_from([24, 48, 65520]) | st.integers(1, 64),
    learning_rate=st.floats(0, exclude_min=True, allow_infinity=False),
    clip_grad_norm=st.floats(0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**32 - 1),
)


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """Matrices whose every value is in its bounds; their cases may break any rule."""
    names = ("gpt", "gpt-fp32", "x" * 106, "x" * 107)
    rows = draw(st.lists(specs, max_size=4))
    used = sorted({row.model for row in rows} | {"gpt"})
    return Matrix(
        summary="",
        devices=(Device.CPU, Device.CUDA),
        time_limit_seconds=draw(st.integers(1, 604_800)),
        models={name: draw(models) for name in names},
        training=draw(trainings),
        tolerance=QUICK.tolerance,
        cases=(*(CaseRow(model=name) for name in used), *rows),
    )


def runnable(drawn: Matrix) -> Matrix | None:
    """The matrix without the cases that the planner refuses; None when no case is left."""
    kept: list[CaseRow] = []
    for row in drawn.cases:
        try:
            expand(drawn.model_copy(update={"cases": (*kept, row)}), "m", CPU)
        except ConfigurationError:
            continue
        kept.append(row)
    return drawn.model_copy(update={"cases": tuple(kept)}) if kept else None


SUBJECT = Subject(name="n", stack="s", base="b", target="t", lock_digest="")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=matrices(), device=st.sampled_from(Device))
def test_smoke_refuses_no_plan_of_the_planner(drawn, device):
    """With smoke's own check; cases that the planner refuses are taken out, so that most examples say something."""
    accepted = runnable(drawn)
    if accepted is None:
        return
    cases = expand(accepted, "m", BEDS[device])
    plan = make_plan(
        subject=SUBJECT, ground=BEDS[device], driver=Driver.MCORE, matrix=accepted, cases=cases, expected=Expected()
    )
    assert [case.id for case in parse_plan(json.dumps(plan).encode()).cases] == [case.id for case in cases]


def with_changes(wrong: Matrix, position: int, advice: str) -> Matrix:
    """The matrix after a person followed the advice for one of its cases."""
    row, model, train = wrong.cases[position], wrong.models[wrong.cases[position].model], wrong.training
    changes = {name: json.loads(value) for name, value in (part.split(" = ") for part in advice.split(", "))}
    assert changes

    def changed(old, kind):
        values = {name: value for name, value in changes.items() if name in kind.model_fields}
        return kind.model_validate(old.model_dump(exclude_unset=kind is CaseRow) | values)

    rows = list(wrong.cases)
    rows[position] = changed(row, CaseRow)
    update = {
        "cases": tuple(rows),
        "models": {**wrong.models, row.model: changed(model, ModelSpec)},
        "training": changed(train, Training),
    }
    return wrong.model_copy(update=update)


def broken_positions(drawn: Matrix) -> set[int]:
    return {
        position
        for position, row in enumerate(drawn.cases)
        if broken_rules(ResolvedRow.of(next(row.specs()), drawn, CPU))
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=matrices())
def test_following_the_advice_repairs_a_case_and_breaks_no_other(drawn):
    broken = broken_positions(drawn)
    if not broken:
        return
    ids = [case_of(row, drawn).id for row in drawn.cases]
    for position, (_, advice) in told(drawn).items():
        followed = with_changes(drawn, position, advice)
        assert broken_positions(followed) <= broken - {position}
        new = case_of(followed.cases[position], followed).id
        # Of several with one ID, the first may keep it.
        assert new not in ids[:position]
        assert new == ids[position] or new not in ids


@given(hidden=st.integers(1, 4000), heads=st.integers(1, 64))
def test_nearest_hidden_size_is_the_nearest(hidden, heads):
    model = gpt(hidden_size=hidden, num_attention_heads=heads)
    fitting = 8 * heads
    if hidden % fitting == 0:
        expand(matrix(models={"gpt": model}), "m", CPU)
        return
    name, nearest = told(matrix(models={"gpt": model}))[0][1].split(" = ")
    assert name == "hidden_size"
    assert int(nearest) % fitting == 0
    assert abs(int(nearest) - hidden) == min(abs(m - hidden) for m in range(fitting, hidden + fitting + 1, fitting))


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
    old = {"training": QUICK.training, "gpt": GPT, "case": BASELINE, "matrix": QUICK}[part]
    kept = old.model_dump(exclude_unset=True)
    type(old).model_validate(kept)
    with pytest.raises(ValidationError, match=name):
        type(old).model_validate(kept | {name: value})


def test_head_size_rule_is_that_of_the_attention_backends():
    assert HEAD_SIZE_MULTIPLE == 8


def test_case_listed_twice():
    assert refused(matrix(spec(data=2), spec(data=2))) == "cases[2]: gpt-fp32-dp2 is listed twice"


def test_cases_that_differ_only_in_overlap_have_one_id():
    """With four stages both settings run; the ID has no word for them."""
    rows = [spec(pipeline=4, virtual_pipeline=2, overlap_p2p_comm=overlap) for overlap in (None, True, False)]
    why = refused(matrix(*rows, models={"gpt": gpt(num_layers=8)})).splitlines()
    assert why == [
        "cases[2]: gpt-fp32-pp4-vp2 is listed twice",
        "cases[3]: gpt-fp32-pp4-vp2 is the ID of another case too, which differs in overlap_p2p_comm; IDs must differ",
    ]


words = st.sampled_from(["gpt", "fp32", "bf16", "baseline", "tp2", "dp2", "pp2"])
rows = st.builds(
    CaseRow,
    model=st.lists(words, min_size=1, max_size=4).map("-".join),
    precision=st.sampled_from(Precision),
    **dict.fromkeys(("data", "tensor", "pipeline", "virtual_pipeline"), st.integers(1, 3)),
)


@given(one=rows, other=rows)
def test_names_of_models_that_look_like_parts_of_an_id_do_not_make_ids_equal(one, other):
    assert (case_of(one).id == case_of(other).id) == (case_of(one) == case_of(other))


def test_id_is_no_longer_than_smoke_takes():
    name = "x" * 106
    expand(QUICK.model_copy(update={"models": {name: GPT}, "cases": (CaseRow(model=name),)}), "m", CPU)
    long = QUICK.model_copy(update={"models": {name + "x": GPT}, "cases": (CaseRow(model=name + "x"),)})
    why = refused(long)
    assert f"{name}x-fp32-baseline has 121 characters; an ID has at most 120: shorten the model's name" in why


def test_case_without_its_baseline():
    wrong = QUICK.model_copy(update={"cases": (spec(data=2),)})
    assert refused(wrong) == "gpt-fp32-dp2: its baseline gpt-fp32-baseline is not among the cases"


def test_case_of_an_unknown_model():
    assert refused(matrix(CaseRow(model="bert", data=(1, 2)))) == refused(matrix(CaseRow(model="bert")))
    assert refused(matrix(CaseRow(model="bert"))) == "cases[1]: no model 'bert' is defined; defined: gpt"


def test_case_without_a_tolerance():
    assert refused(matrix(tolerance={})) == "cases[0]: there is no [tolerance.fp32]"


def test_all_problems_are_told_at_once():
    assert len(refused(matrix(spec(data=2), spec(data=2), spec(pipeline=3), CaseRow(model="bert"))).splitlines()) == 3


def test_matrix_for_another_device():
    with pytest.raises(ConfigurationError, match="matrix m is not for device cpu") as caught:
        expand(QUICK.model_copy(update={"devices": (Device.CUDA,)}), "m", CPU)
    assert "cuda" in caught.value.why
    assert "--matrix" in caught.value.fix


def test_id_is_made_from_all_fields():
    assert case_of(spec(precision=Precision.FP32, tensor=2)).id == "gpt-fp32-tp2"
