"""Nodes that are not as the others are named: in what they run, in their clocks, numbers and times."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers.fake_runner import gradients_of, resumed_line
from unit.certify.plans import BASELINE, CASES, MATRIX, TP2, line, lines_of, plan_of, read, typed

from envbuild.certify.issue import node_records
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.nodes import number_problems
from envbuild.core.errors import ResultsRefusedError

PLAN = plan_of(nodes=3)
OVER_TWO = plan_of(nodes=3, device="cuda", gpu={"sm": ["90"]})
GPU = {"index": 0, "uuid": "GPU-9", "name": "NVIDIA H100", "memory": "x", "driver": "2", "compute_capability": "9.0"}
FINDING = {"code": "shadowed", "package": "torch", "expected": "a", "found": "b"}


def problems_of(tmp_path: Any, lines: list[dict[str, Any]], plan: dict[str, Any] = PLAN) -> list[tuple[str, str]]:
    results = read(tmp_path / "results.jsonl", plan, lines)
    problems = (*run_problems(typed(plan), results), *number_problems(MATRIX, typed(plan), results))
    return [(problem.check, problem.text) for problem in problems]


def node_of(lines: list[dict[str, Any]], node: int) -> dict[str, Any]:
    """The line of a node, with parts of its own."""
    index = next(index for index, line in enumerate(lines) if line.get("node") == node)
    lines[index] = copy.deepcopy(lines[index])
    return lines[index]


def test_nodes_that_are_alike_have_no_problem(tmp_path):
    lines = lines_of(PLAN)
    assert problems_of(tmp_path, lines) == []
    assert sum(line.get("case") == TP2 for line in lines) == 3


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("image", {"file_digest": f"sha256:{'a' * 64}"}, f"image: sha256:{'a' * 64}, and sha256:"),
        ("image", {"fingerprint": {"lock_digest": "b"}}, "lock of the image: b, and sha256:"),
        ("machine", {"gpus": [GPU]}, "GPUs: 1 x NVIDIA H100, and none on node 0; driver: 2, and none on node 0"),
        ("machine", {"nccl": "2.20.5"}, "NCCL: 2.20.5, and None on node 0"),
        ("environment", {"python": "3.12.1"}, "Python: 3.12.1, and 3.11.2 on node 0"),
        ("environment", {"versions": {"torch": "2.7"}}, "torch 2.7, and none on node 0"),
        ("environment", {"files": {"torch": "/home/torch"}}, "torch is imported from /home/torch, and from None on"),
        ("", {"environment_findings": [FINDING]}, "shadowed: torch: expected a, found b, and not so on node 0"),
        ("", {"clock_ahead_seconds": 400.0}, "its clock is 400 s ahead of node 0's"),
        ("", {"clock_ahead_seconds": -6.0}, "its clock is 6 s behind node 0's"),
    ],
)
def test_node_that_is_not_as_node_0_is_named(tmp_path, part, changes, words):
    lines = lines_of(PLAN)
    node = node_of(lines, 2)
    (node[part] if part else node).update(changes)
    ((check, text),) = problems_of(tmp_path, lines)
    assert check == "nodes"
    assert text.startswith(f"node 2 (node-2) is not as node 0: {words}")


def test_clock_that_is_measured_badly_is_no_problem(tmp_path):
    lines = lines_of(PLAN)
    node_of(lines, 1).update(clock_ahead_seconds=6.0, clock_error_seconds=2.0)
    assert problems_of(tmp_path, lines) == []


def test_node_that_did_not_report_is_named(tmp_path):
    lines = [line for line in lines_of(PLAN) if line.get("node") != 1]
    ((check, text),) = problems_of(tmp_path, lines)
    assert (check, text.partition(":")[0]) == ("nodes", "node 1 did not report what runs there")


def test_node_whose_line_is_of_a_part_without_a_case_does_not_count(tmp_path):
    lines = lines_of(PLAN)
    nodes = [line for line in lines if line["type"] == "node"]
    resumed = resumed_line(lines[0])
    wrong = {**nodes[0], "clock_ahead_seconds": 400.0}
    assert problems_of(tmp_path, [lines[0], wrong, nodes[1], resumed, *lines[1:]]) == []
    # A case ran between the two.
    assert len(problems_of(tmp_path, [lines[0], wrong, *lines[3:5], resumed, *nodes, *lines[5:]])) == 1


def test_results_of_another_node_than_planned_are_refused(tmp_path):
    for change in ({"node": 3}, {"nodes": [1]}):
        lines = lines_of(PLAN)
        (lines[1] if "node" in change else line(lines, TP2)).update(change)
        with pytest.raises(ResultsRefusedError):
            read(tmp_path / "results.jsonl", PLAN, lines)


def change_losses(lines: list[dict[str, Any]], node: int, factor: float, *cases: str) -> None:
    for case in cases:
        for step in line(lines, case, node + 1)["steps"]:
            step["loss"] *= factor


def test_node_whose_numbers_differ_is_named_although_they_agree_with_its_own_baseline(tmp_path):
    lines = lines_of(PLAN)
    every = [case.id for case in CASES]
    change_losses(lines, 1, 1.01, *every)
    results = read(tmp_path / "results.jsonl", PLAN, lines)
    parity = [problem for verdict in judge(CASES, MATRIX, results, typed(PLAN)) for problem in verdict.problems]
    assert [problem for problem in parity if problem.check == "parity-loss"] == []
    ((check, text),) = problems_of(tmp_path, lines)
    assert check == "node-numbers"
    named = (
        f"node 1 (node-1) computes other numbers than the other nodes: {BASELINE}, step 1: loss expected 6.375, found"
    )
    assert text.startswith(named)
    assert text.endswith(f"; so do {len(every) - 1} more")


def test_numbers_within_the_bands_are_no_problem(tmp_path):
    lines = lines_of(PLAN)
    change_losses(lines, 1, 1 + 1e-7, *(case.id for case in CASES))
    assert problems_of(tmp_path, lines) == []


def test_of_two_nodes_that_differ_either_may_be_the_wrong_one(tmp_path):
    plan = plan_of(nodes=2)
    lines = lines_of(plan)
    change_losses(lines, 1, 1.01, BASELINE, TP2)
    problems = problems_of(tmp_path, lines, plan)
    assert [(check, text[:6]) for check, text in problems] == [("node-numbers", "node 0"), ("node-numbers", "node 1")]
    assert "than the other node, and either may be wrong: " in problems[0][1]


@pytest.mark.parametrize(
    ("nodes", "off", "named"), [(2, (1,), (0, 1)), (3, (1,), (1,)), (3, (0,), (0,)), (4, (2, 3), (0, 2, 3))]
)
def test_node_whose_gradients_differ_is_named(tmp_path, nodes, off, named):
    plan = plan_of(nodes=nodes)
    lines = lines_of(plan)
    for node in off:
        own = line(lines, BASELINE, node + 1)
        own["gradients"] = gradients_of(1.01)
        for run in own["perturbed"] or ():
            run["gradients"] = gradients_of(1.01 * (1 + 1e-6))
    problems = problems_of(tmp_path, lines, plan)
    assert [(check, text.split(" ")[1]) for check, text in problems] == [("node-numbers", str(node)) for node in named]
    assert all(f"{BASELINE}, the gradient of decoder.layers.0.mlp" in text for _, text in problems)


def test_one_node_measures_the_bands_of_all(tmp_path):
    lines = lines_of(PLAN)
    assert [line(lines, BASELINE, node + 1)["perturbed"] is None for node in range(3)] == [False, True, True]
    assert all(verdict.passed for verdict in judge(CASES, MATRIX, read(tmp_path / "r", PLAN, lines), typed(PLAN)))
    line(lines, BASELINE)["perturbed"] = None
    verdicts = judge(CASES, MATRIX, read(tmp_path / "r", PLAN, lines), typed(PLAN))
    assert {verdict.repeat for verdict in verdicts if any(p.check == "baseline" for p in verdict.problems)} == {1, 2, 3}


def test_case_at_home_on_a_node_runs_there_alone_and_is_judged_by_what_ran_there(tmp_path):
    plan = plan_of(nodes=3)
    next(case for case in plan["cases"] if case["id"] == TP2)["home_node"] = 2
    lines = lines_of(plan)
    assert [(each["repeat"], each["nodes"]) for each in lines if each.get("case") == TP2] == [(3, [2])]
    line(lines, TP2, 3)["steps"][0]["loss"] *= 1.01
    verdicts = judge(CASES, MATRIX, read(tmp_path / "r", plan, lines), typed(plan))
    assert [(each.id, each.nodes) for each in verdicts if not each.passed] == [(TP2, (2,))]
    line(lines, TP2, 3).update(repeat=1, nodes=[0])
    with pytest.raises(ResultsRefusedError):
        read(tmp_path / "r", plan, lines)


def errors(count: int) -> list[dict[str, str]]:
    return [{"index": "0", "uncorrected_ecc_errors": "0"}, {"index": "1", "uncorrected_ecc_errors": str(count)}]


def test_errors_of_a_gpus_memory_on_another_node_are_a_problem(tmp_path):
    lines = lines_of(PLAN)
    for node in (1, 2):
        node_of(lines, node)["gpu_states"] = errors(3)
    lines[-1]["nodes"] = [{"node": node, "gpu_states": errors(count)} for node, count in ((1, 3), (2, 5))]
    text = "GPU 1 of node 2 (node-2) had 2 uncorrectable ECC errors while the cases ran"
    assert problems_of(tmp_path, lines) == [("hardware", text)]


def test_errors_of_another_host_before_the_run_was_resumed_there_are_none(tmp_path):
    lines = lines_of(PLAN)
    lines[0]["gpu_states"], lines[-1]["gpu_states"] = errors(0), errors(3)
    nodes = [copy.deepcopy(line) for line in lines if line["type"] == "node"]
    lines[-1:-1] = [resumed_line(lines[0], host="other", gpu_states=errors(3)), *nodes]
    assert problems_of(tmp_path, lines) == []


def test_certificate_has_each_node_as_it_recorded_itself(tmp_path):
    lines = lines_of(PLAN)
    other = node_of(lines, 2)
    other["machine"], other["image"]["file_digest"] = {**other["machine"], "gpus": [GPU]}, f"sha256:{'a' * 64}"
    # The plan's lines of nodes are in no order.
    lines[1:3] = lines[2:0:-1]
    records = [*node_records(read(tmp_path / "results.jsonl", PLAN, lines))]
    assert [(each.node, each.host) for each in records] == [(0, lines[0]["host"]), (1, "node-1"), (2, "node-2")]
    assert [len(each.gpus) for each in records] == [0, 0, 1]
    assert records[2].gpus[0].driver == "2"
    digest = lines[0]["image"]["file_digest"]
    assert [each.image for each in records] == [digest, digest, f"sha256:{'a' * 64}"]


def test_failed_rank_is_named_with_its_node(tmp_path):
    lines = lines_of(PLAN)
    failure = {
        "kind": "exception",
        "message": "OSError: No space left on device",
        "rank": 1,
        "exit_status": 1,
        "node": 1,
    }
    line(lines, TP2, 2).update(status="failed", failure={**failure, "log": "cases/x/rank1.log"})
    lines[-1]["completed"] -= 1
    results = read(tmp_path / "results.jsonl", PLAN, lines)
    (verdict,) = (each for each in judge(CASES, MATRIX, results, typed(PLAN)) if (each.id, each.repeat) == (TP2, 2))
    assert str(verdict.problems[0]).endswith("(rank 1: cases/x/rank1.log) on node 1 (node-1)")
    assert verdict.nodes == (1,)


@pytest.mark.parametrize(
    ("kind", "message", "check"),
    [
        ("node-lost", "node 1 (h) was lost: it was silent for 20 s", "nodes"),
        ("terminated", "killed by SIGTERM", "rank-signal"),
    ],
)
def test_case_that_was_ended_from_outside_counts_unless_it_was_trained_again(tmp_path, kind, message, check):
    lines = lines_of(PLAN)
    own = line(lines, TP2, 2)
    failure = {"kind": kind, "message": message}
    lost = {**own, "status": "failed", "failure": {**failure, "rank": None, "exit_status": None, "log": None}}
    resumed = {"schema": lines[0]["schema"], "type": "resumed", "at": "2026-01-01T00:00:30Z", "cut_bytes": 0}
    resumed |= {"host": "node-0"}
    again = [*lines[:3], lost, resumed, *lines[1:]]
    results = read(tmp_path / "results.jsonl", PLAN, again)
    assert all(verdict.passed for verdict in judge(CASES, MATRIX, results, typed(PLAN)))
    with pytest.raises(ResultsRefusedError, match="cannot be judged"):
        read(tmp_path / "results.jsonl", PLAN, [*lines[:3], lost, *lines[3:]])
    end = {**lines[-1], "completed": lines[-1]["completed"] - 1}
    results = read(tmp_path / "results.jsonl", PLAN, [*(lost if each is own else each for each in lines[:-1]), end])
    (failed,) = (verdict for verdict in judge(CASES, MATRIX, results, typed(PLAN)) if not verdict.passed)
    assert str(failed.problems[0]) == f"{check}: failed: {message}"


# ---- slow nodes


def timed(nodes: int = 4, device: str = "cuda", **times: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A plan with a case over two nodes, and results with times; ``times``: those of a node, by who is with it."""
    gpus = {"gpu": {"sm": ["90"]}} if device == "cuda" else {}
    plan = plan_of(nodes=nodes, device=device, **gpus)
    case = next(case for case in plan["cases"] if case["id"] == "gpt-fp32-dp2")
    case["nodes"] = 2
    lines = lines_of(plan, gpus=[{"index": index} for index in range(4)])
    for each in lines:
        if each["type"] != "case":
            continue
        size = len(each["devices"])
        seconds = [times["slow"](each, each["nodes"][rank * len(each["nodes"]) // size]) for rank in range(size)]
        each["compute_seconds"] = [[9.0, *(value for _ in each["steps"][1:])] for value in seconds]
    return plan, lines


def slow_problems(tmp_path: Any, plan: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    return [text for check, text in problems_of(tmp_path, lines, plan) if check == "node-slow"]


def test_node_that_is_slow_with_every_partner_is_named(tmp_path):
    (text,) = slow_problems(tmp_path, *timed(slow=lambda _, node: 0.12 if node == 2 else 0.1))
    assert text.startswith("node 2 (node-2) is the slowest in ")
    assert "with 3 sets of other nodes" in text
    assert text.endswith("20% longer than the median until they communicate")


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("less than a tenth", lambda _, node: 0.109 if node == 2 else 0.1),
        ("alone only", lambda line, node: 0.2 if node == 2 and len(line["nodes"]) == 1 else 0.1),
        ("with one partner only", lambda line, node: 0.2 if node == 2 and line["nodes"] == [1, 2] else 0.1),
        ("all", lambda _line, _node: 0.2),
    ],
)
def test_node_that_is_slow_once_or_by_less_is_not_named(tmp_path, name, slow):
    assert slow_problems(tmp_path, *timed(slow=slow)) == [], name


def test_node_that_is_slow_in_few_steps_is_not_named(tmp_path):
    plan, lines = timed(slow=lambda _, node: 0.12 if node == 2 else 0.1)
    for each in lines:
        for seconds in each.get("compute_seconds", ()):
            seconds[2:] = [0.1] * len(seconds[2:])
    assert slow_problems(tmp_path, plan, lines) == []


def test_of_two_nodes_one_that_is_slow_alone_and_with_the_other_is_named(tmp_path):
    (text,) = slow_problems(tmp_path, *timed(nodes=2, slow=lambda _, node: 0.15 if node else 0.1))
    assert text.startswith("node 1 (node-1)")


def test_on_cpus_nothing_is_judged_by_time(tmp_path):
    assert slow_problems(tmp_path, *timed(device="cpu", slow=lambda _, node: 9.0 if node == 2 else 0.1)) == []
