"""The judge on real training: the right interleaved pipeline agrees, megatron-core's default settings do not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envbuild.catalog.catalog import Selection
from envbuild.certify.cases import expand
from envbuild.certify.ground import Ground
from envbuild.certify.judge import Verdict, judge
from envbuild.certify.plan import Expected, Subject, make_plan
from envbuild.certify.results import read_results
from envbuild.certify.zipapp import smoke_bytes
from envbuild.core.digests import sha256_bytes

INTERLEAVED = "gpt-fp32-pp2-vp2"
SUBJECT = Subject(name="n", stack="mcore", base="b", target="cpu", lock_digest="l", place="venv")


def run_plan(python: Path, folder: Path, selection: Selection, settings: dict[str, bool] | None) -> dict[str, Verdict]:
    """Train baseline and interleaved pipeline; ``settings`` replaces the ones the planner chose."""
    matrix = selection.catalog.matrix("certify-quick")
    chosen = expand(matrix, "certify-quick", Ground.of(selection))
    cases = tuple(case for case in chosen if case.is_baseline or case.id == INTERLEAVED)
    plan: dict[str, Any] = make_plan(
        subject=SUBJECT,
        ground=Ground.of(selection),
        driver=selection.stack.driver,
        matrix=matrix,
        cases=cases,
        expected=Expected(),
    )
    if settings is not None:
        next(case for case in plan["cases"] if case["id"] == INTERLEAVED)["settings"] |= settings
    content = json.dumps(plan).encode()
    (folder / "plan.json").write_bytes(content)
    (folder / "smoke.pyz").write_bytes(smoke_bytes())
    command = [python, folder / "smoke.pyz", "run", "--plan", folder / "plan.json", "--out", folder / "out"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = read_results(folder / "out" / "results.jsonl", plan, sha256_bytes(content))
    return {verdict.case.id: verdict for verdict in judge(cases, matrix, results, plan)}


def test_certify_interleaved_pipeline_with_planned_settings_agrees(
    stack_python: Path, selection: Selection, tmp_path: Path
) -> None:
    verdict = run_plan(stack_python, tmp_path, selection, settings=None)[INTERLEAVED]
    assert verdict.passed, verdict.problems


def test_certify_interleaved_pipeline_with_library_defaults_is_caught_at_step_one(
    stack_python: Path, selection: Selection, tmp_path: Path
) -> None:
    defaults = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    verdict = run_plan(stack_python, tmp_path, selection, settings=defaults)[INTERLEAVED]
    assert not verdict.passed
    found = [problem for problem in verdict.problems if problem.text.startswith("step 1: loss expected")]
    assert [problem.check for problem in found] == ["parity-loss"], verdict.problems
    # It "trains": every step is there and the loss falls. Only the comparison tells.
    losses = [step.loss for step in verdict.steps]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5


@pytest.mark.parametrize("package", ["megatron-core", "torch"])
def test_certify_version_that_differs_from_the_lock_is_a_finding(
    stack_python: Path, selection: Selection, tmp_path: Path, package: str
) -> None:
    matrix = selection.catalog.matrix("certify-quick")
    cases = expand(matrix, "certify-quick", Ground.of(selection))[:1]
    plan = make_plan(
        subject=SUBJECT,
        ground=Ground.of(selection),
        driver=selection.stack.driver,
        matrix=matrix,
        cases=cases,
        expected=Expected(versions={package: "0.0.1"}),
    )
    content = json.dumps(plan).encode()
    (tmp_path / "plan.json").write_bytes(content)
    (tmp_path / "smoke.pyz").write_bytes(smoke_bytes())
    command = [stack_python, tmp_path / "smoke.pyz", "run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    results = read_results(tmp_path / "out" / "results.jsonl", plan, sha256_bytes(content))
    found = {(finding["code"], finding["package"], finding["expected"]) for finding in results.environment_findings}
    assert ("version-mismatch", package, "0.0.1") in found
