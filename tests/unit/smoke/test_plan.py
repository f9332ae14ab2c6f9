"""A wrong plan is refused before anything runs; the message has the place, the value and what is allowed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild_smoke.plan.axes import Layout, Part
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.plan.models import PlanError
from envbuild_smoke.plan.reader import parse_plan, read_plan

Document = dict[str, Any]
BANDWIDTH = {"ranks": 2, "sizes_bytes": [1024], "floor_gigabytes_per_second": None}
MAMBA = {"hybrid_override_pattern": "M*-M", "state_dim": 16, "head_dim": 16, "num_groups": 1}


def refusal(document: Document) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(json.dumps(document).encode())
    return str(caught.value)


def change(document: Document, path: str, value: object) -> Document:
    *parents, last = path.split(".")
    target: Any = document
    for key in parents:
        target = target[int(key) if key.isdigit() else key]
    target[int(last) if last.isdigit() else last] = value
    return document


def test_plan_baselines_come_first(document: Document) -> None:
    document["cases"].reverse()
    plan = parse_plan(json.dumps(document).encode())
    assert [case.id for case in plan.cases] == ["train-baseline", "train-dp2"]
    assert plan.case("train-dp2").layout.world_size == 2


def test_plan_digest_is_of_the_bytes(document: Document) -> None:
    one, other = json.dumps(document).encode(), json.dumps(document, indent=2).encode()
    assert parse_plan(one).digest != parse_plan(other).digest
    assert parse_plan(one).cases == parse_plan(other).cases


def test_case_has_a_part_where_it_is_not_resumed(document: Document) -> None:
    (baseline, case) = parse_plan(json.dumps(document).encode()).cases
    assert case.parts == (Part(layout=case.layout, nodes=1, after=0, until=case.training.steps),)
    assert (baseline.slots, case.slots, case.most_nodes) == (1, 2, 1)


@pytest.mark.parametrize(
    ("nodes", "ranks", "continue_nodes", "slots"),
    # Of (nodes, ranks on each) the most of both.
    [(1, 2, None, 2), (1, 4, None, 4), (2, 2, 1, 4), (1, 2, 2, 4), (2, 4, None, 4)],
)
def test_resumed_case_has_two_parts_and_room_for_both(
    document: Document, nodes: int, ranks: int, continue_nodes: int | None, slots: int
) -> None:
    other = as_json(Layout(data=ranks))
    own = {"nodes": nodes, "resume_at": 2, "continue_in": other, "continue_nodes": continue_nodes}
    document["cases"][1].update(own)
    plan = parse_plan(json.dumps({**document, "nodes": 2}).encode())
    case = plan.cases[1]
    first, second = case.parts
    assert (first.layout, first.nodes, first.after, first.until) == (case.layout, nodes, 0, 2)
    assert (second.layout, second.nodes) == (Layout(data=ranks), continue_nodes or nodes)
    assert (second.after, second.until) == (2, case.training.steps)
    assert case.slots == slots
    assert plan.nodes_of(case, 1) == tuple(range(max(nodes, continue_nodes or nodes)))


@pytest.mark.parametrize(("nodes", "problem"), [(3, "found 3; the run has 2"), (2, "as many of the 3 ranks")])
def test_nodes_of_a_second_part_are_the_runs_and_have_as_many_ranks(
    document: Document, nodes: int, problem: str
) -> None:
    own = {"resume_at": 2, "continue_in": as_json(Layout(data=3)), "continue_nodes": nodes}
    document["cases"][1].update(own)
    with pytest.raises(PlanError, match=problem):
        parse_plan(json.dumps({**document, "nodes": 2}).encode())


def test_selection_brings_the_baseline_along(document: Document) -> None:
    plan = parse_plan(json.dumps(document).encode())
    assert [case.id for case in plan.selection(("train-dp2",))] == ["train-baseline", "train-dp2"]
    assert [case.id for case in plan.selection(("train-baseline",))] == ["train-baseline"]


def test_selection_of_unknown_case_lists_the_known(document: Document) -> None:
    plan = parse_plan(json.dumps(document).encode())
    with pytest.raises(PlanError, match=r"train-tp2.*train-baseline, train-dp2"):
        plan.selection(("train-tp2",))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema", "envbuild.plan/2", ["plan.schema", '"envbuild.plan/2"', "'envbuild.plan/4'"]),
        ("nonce", "xyz", ["plan.nonce", "xyz", "32 lower-case"]),
        ("device", "tpu", ["plan.device", "tpu", "'cpu', 'cuda'"]),
        ("gpu", {"sm": ["90"]}, ["plan.gpu", "an object with device 'cpu'", "null on the CPU"]),
        ("gpu", {"sm": []}, ["plan.gpu.sm", "1 or more"]),
        ("gpu", {"sm": ["9.0"]}, ["plan.gpu.sm", "without its dot"]),
        ("expected_modules", ["torch", "a b"], ["plan.expected_modules[1]", "dotted name"]),
        ("repeats", 0, ["plan.repeats", "found 0", "1 or more"]),
        ("bandwidth", BANDWIDTH | {"ranks": 0}, ["plan.bandwidth.ranks", "1 or more"]),
        ("bandwidth", {}, ["plan.bandwidth.ranks", "missing"]),
        ("extra", 1, ["plan", "unknown key 'extra'", "'cases'"]),
        ("cases.1.compare_weights", None, ["plan.cases[1].compare_weights", "true or false"]),
        ("subject", {"stack": 1}, ["plan.subject.stack", "found 1", "a string"]),
        ("cases", [], ["plan.cases", "1 or more"]),
        ("cases.1", 7, ["plan.cases[1]", "7", "an object"]),
        ("cases.1.id", "../evil", ["plan.cases[1].id", "../evil", "names a directory"]),
        ("cases.1.id", "a" * 121, ["plan.cases[1].id", "120"]),
        ("cases.1.id", "a\n", ["plan.cases[1].id"]),
        ("cases.1.id", "train-baseline", ["'train-baseline' occurs twice"]),
        ("cases.1.baseline", "no-such-case", ["train-dp2", "no-such-case", "'train-baseline'"]),
        ("cases.1.baseline", "train-dp2", ["train-dp2", "the plan's baselines: 'train-baseline'"]),
        ("cases.1.driver", "jax", ["plan.cases[1].driver", "jax", "'mcore'"]),
        ("cases.1.model", "bert", ["train-dp2", "bert", "'gpt'"]),
        ("cases.1.training.steps", True, ["plan.cases[1].training.steps", "found true"]),
        ("cases.1.training.steps", 2.0, ["plan.cases[1].training.steps", "found 2.0"]),
        ("cases.1.training.learning_rate", "0.1", ["learning_rate", "above 0"]),
        ("cases.1.time_limit_seconds", 10**400, ["plan.cases[1].time_limit_seconds", "above 0"]),
        ("models.gpt.mamba", MAMBA | {"hybrid_override_pattern": "MX"}, ["hybrid_override_pattern", "M (Mamba)"]),
    ],
)
def test_plan_refused(document: Document, path: str, value: object, words: list[str]) -> None:
    message = refusal(change(document, path, value))
    for word in words:
        assert word in message


def test_plan_layouts_are_the_planners_to_check(document: Document) -> None:
    """The runner runs what the plan has, also what computes something else: that is how a fault is planted."""
    document["cases"][1]["layout"].update({"data": 3, "pipeline": 2, "virtual_pipeline": 2, "sequence": True})
    assert parse_plan(json.dumps(document).encode()).cases[1].layout.world_size == 6


def test_case_at_home_runs_there_and_what_every_node_runs_is_measured_on_the_first(document: Document) -> None:
    baseline, case = document["cases"]
    cases = [{**baseline, "perturbed_runs": 4, "compare_reference": True}, {**case, "home_node": 1}]
    plan = parse_plan(json.dumps({**document, "cases": cases, "nodes": 3, "repeats": 2}).encode())
    everywhere, home = plan.case(baseline["id"]), plan.case(case["id"])
    assert (list(plan.runs_of(everywhere)), list(plan.runs_of(home))) == ([1, 2, 3, 4, 5, 6], [2, 5])
    assert [plan.nodes_of(home, repeat) for repeat in (2, 5)] == [(1,), (1,)]
    measured = {repeat: plan.run_of(everywhere, repeat) for repeat in plan.runs_of(everywhere)}
    assert {repeat: run.perturbed_runs for repeat, run in measured.items()} == {1: 4, 2: 0, 3: 0, 4: 4, 5: 0, 6: 0}
    assert [repeat for repeat, run in measured.items() if run.compare_reference] == [1, 4]
    alone = dataclasses.replace(everywhere, home_node=2)
    assert [plan.run_of(alone, repeat).perturbed_runs for repeat in plan.runs_of(alone)] == [4, 4]


@pytest.mark.parametrize(("baseline", "case"), [(None, 2), (0, 1), (1, None)])
def test_case_at_home_where_its_baseline_does_not_run_is_refused(
    document: Document, baseline: int | None, case: int | None
) -> None:
    homes = zip(document["cases"], (baseline, case), strict=True)
    cases = [{**planned, "home_node": home} for planned, home in homes]
    problem = f"home_node: found {case}; the run has 2 nodes, and train-baseline has to run there, too"
    assert problem in refusal({**document, "cases": cases, "nodes": 2})


def test_plan_for_gpus_must_say_which(document: Document) -> None:
    document["device"] = "cuda"
    assert "plan.gpu: found null with device 'cuda'" in refusal(document)
    document["gpu"] = {"sm": ["90", "100a"]}
    read = parse_plan(json.dumps(document).encode())
    assert read.gpu is not None
    assert read.gpu.sm == ("90", "100a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["not JSON", "line 1"]),
        (b"\xff", ["not UTF-8"]),
        (b"[]", ["plan", "an object"]),
        (b'{"schema": 1, "schema": 2}', ["'schema' occurs twice"]),
        (b'{"schema": NaN}', ["NaN"]),
        (b"[" * 100_000, ["nested too deeply"]),
    ],
)
def test_plan_that_is_not_json_is_refused(content: bytes, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(content)
    for word in words:
        assert word in str(caught.value)


def test_plan_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no-such-plan"):
        read_plan(tmp_path / "no-such-plan.json")
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"plan\.json: plan\.schema: missing"):
        read_plan(path)
