"""Real Megatron-Core over two nodes: two runners of one machine on loopback, which join, train and are judged."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import zipapp
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.environments import Environment as Stack
from faults.kinds import edit

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand
from envbuild.certify.cases.selection import with_baselines
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.nodes import number_problems
from envbuild.certify.judge.results import Results, read_results
from envbuild.certify.run.plan import Environment, Network, Subject, make_plan
from envbuild.core.digests import sha256_bytes
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.reader import parse_plan

SMOKE = Path(__file__).resolve().parents[2] / "smoke"
CPU = Capabilities(device=Device.CPU)
MATRIX = Catalog.open(Path("/nonexistent")).matrix("certify-full")
NODES = 2
# What is split over the nodes: data, data with tensor within, pipeline stages, contexts, experts, optimizer; resumed,
# also on fewer nodes and on more.
CASES = (
    "gpt-fp32-dp2-tp2-do-n2",
    "gpt-fp32-pp2-vp2-n2",
    "gpt-fp32-cp2-n2",
    "moe-fp32-dp2-ep2-n2",
    "gpt-fp32-dp2-do-n2-resume2",
    "gpt-fp32-dp4-do-n2-resume2-in-dp2-on-n1",
    "gpt-fp32-dp2-do-resume2-on-n2",
    "gpt-fp32-tp2",
)
# By one node alone; the cases of one that are named before it, and their baselines, are run by both.
AT_HOME = "gpt-fp32-pp2"
SUBJECT = Subject(
    name="n", stack="mcore", base="debian12", target="cpu", lock_digest=sha256_bytes(b"lock"),
    place=Placement.parse("venv"),
)  # fmt: skip


def chosen(names: tuple[str, ...]) -> tuple[Case, ...]:
    cases = with_baselines(expand(MATRIX, "certify-full", CPU), names)
    # Enough to save after two and continue.
    return tuple(dataclasses.replace(case, training=dataclasses.replace(case.training, steps=3)) for case in cases)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended: its cases, its results, and their problems."""

    cases: tuple[Case, ...]
    results: Results
    failed: dict[tuple[str, int], list[str]]
    problems: list[str]


def run_on_nodes(python: Path, folder: Path, names: tuple[str, ...], faults: Sequence[str] = ("", "")) -> Run:
    """Run cases on two nodes, each with a fault of its own."""
    cases = chosen(names)
    plan = make_plan(
        SUBJECT, Environment(capabilities=CPU, driver=Driver.MCORE), MATRIX, cases, network=Network(nodes=NODES)
    )
    content = json.dumps(plan).encode()
    (folder / "plan.json").write_bytes(content)
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    zipapp.create_archive(SMOKE, folder / "smoke.pyz", filter=lambda path: "__pycache__" not in path.parts)
    words: list[str | Path] = [
        python,
        "-I",
        "smoke.pyz",
        "run",
        "--plan",
        "plan.json",
        "--out",
        "out",
        "--nodes",
        str(NODES),
    ]
    words += ["--head", "127.0.0.1:0", "--token-file", "token"]
    running = [
        subprocess.Popen(
            [*words, "--node-rank", str(rank)],
            cwd=folder,
            env={**os.environ, "ENVBUILD_FAULT": fault},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        for rank, fault in enumerate(faults)
        if (log := (folder / f"node{rank}.log").open("w"))
    ]
    statuses = [process.wait(timeout=600) for process in running]
    assert statuses == [0, 0], "\n".join((folder / f"node{rank}.log").read_text() for rank in range(NODES))
    typed = parse_plan(content)
    results = read_results(folder / "out/results.jsonl", typed)
    verdicts = judge(cases, MATRIX, results, typed)
    problems = [*run_problems(typed, results), *number_problems(MATRIX, typed, results)]
    return Run(
        cases=cases,
        results=results,
        failed={(each.id, each.repeat): [*map(str, each.problems)] for each in verdicts if not each.passed},
        problems=[str(problem) for problem in problems if problem.check != "environment"],
    )


@pytest.fixture(scope="module")
def run(stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on_nodes(stack_python, tmp_path_factory.mktemp("nodes"), (*CASES, AT_HOME))


@pytest.mark.slow
def test_what_is_split_over_nodes_agrees_with_one_process(run: Run) -> None:
    assert run.failed == {}
    assert run.problems == []
    for name in CASES:
        line = run.results.case(name)
        assert line is not None
        assert line.nodes == ((0, 1) if "n2" in name else (0,))


@pytest.mark.slow
def test_both_nodes_ran_what_is_compared_between_them_and_one_measured_for_both(run: Run) -> None:
    alone = [case.id for case in run.cases if case.most_nodes == 1 and case.id != AT_HOME]
    for name in alone:
        one, two = run.results.case(name), run.results.case(name, 2)
        assert one is not None
        assert two is not None
        assert (one.nodes, two.nodes) == ((0,), (1,))
        is_baseline = name.endswith("baseline")
        assert (one.perturbed is not None, one.reference is not None) == (is_baseline, is_baseline)
        assert (two.perturbed, two.reference) == (None, None)
    assert [repeat for repeat in (1, 2) if run.results.case(AT_HOME, repeat)] == [2]
    (other,) = run.results.nodes
    assert (other.node, other.environment.versions) == (1, run.results.run.environment.versions)


@pytest.mark.slow
def test_node_that_computes_other_numbers_is_named_although_its_cases_agree(stack_python: Path, tmp_path: Path) -> None:
    stack = Stack(stack_python.parents[1]).copy(tmp_path / "stack")
    norm = "total_norm.item() ** (1.0 / norm_type)"
    wrong = f'{norm} * float(__import__("os").environ["ENVBUILD_FAULT"])'
    stack.edit(edit("megatron/core/optimizer/clip_grads.py", norm, wrong))
    run = run_on_nodes(stack.python, tmp_path, ("gpt-fp32-tp2",), ("1", "1.001"))
    assert run.failed == {}
    # Of two nodes either may be the wrong one.
    assert [problem.partition(" (")[0] for problem in run.problems] == ["node-numbers: node 0", "node-numbers: node 1"]
    assert all("; so do 1 more" in problem for problem in run.problems)
