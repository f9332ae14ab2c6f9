"""The judge on real training: the right interleaved pipeline agrees, megatron-core's default settings do not."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.processes import alive, wait_until

from envbuild.catalog.catalog import Selection
from envbuild.certify.cases import expand
from envbuild.certify.cases.capabilities import Capabilities
from envbuild.certify.judge.judge import Verdict, judge
from envbuild.certify.judge.results import read_results
from envbuild.certify.run.plan import Expected, Subject, make_plan
from envbuild.certify.run.zipapp import smoke_bytes
from envbuild.core.digests import sha256_bytes
from envbuild.lock.lockfile import LockDirectory

INTERLEAVED = "gpt-fp32-pp2-vp2"
SUBJECT = Subject(name="n", stack="mcore", base="b", target="cpu", lock_digest="l", place="venv")


def run_plan(python: Path, folder: Path, selection: Selection, settings: dict[str, bool] | None) -> dict[str, Verdict]:
    """Train baseline and interleaved pipeline; ``settings`` replaces the ones the planner chose."""
    matrix = selection.catalog.matrix("certify-quick")
    chosen = expand(matrix, "certify-quick", Capabilities.of(selection))
    cases = tuple(case for case in chosen if case.is_baseline or case.id == INTERLEAVED)
    plan: dict[str, Any] = make_plan(
        subject=SUBJECT,
        ground=Capabilities.of(selection),
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
    cases = expand(matrix, "certify-quick", Capabilities.of(selection))[:1]
    plan = make_plan(
        subject=SUBJECT,
        ground=Capabilities.of(selection),
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


def processes_with(text: str) -> list[int]:
    """Who has it on the command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if alive(pid)]


def case_lines(results: Path) -> list[str]:
    """Whole lines about cases; none where nothing was written yet."""
    with contextlib.suppress(FileNotFoundError):
        return [line for line in results.read_text().splitlines(keepends=True) if '"type": "case"' in line]
    return []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_certify_that_was_killed_leaves_no_process_and_goes_on_with_what_it_had(
    stack_python: Path, mcore_lock: LockDirectory, site_cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    shutil.copytree(mcore_lock.path, tmp_path / "lockfiles" / "mcore" / mcore_lock.path.name)
    tool, out = Tool(tmp_path, site_cache), tmp_path / "out"
    words = ["certify", "--stack", "mcore", "--target", "cpu", "--in", "venv", "--venv", str(stack_python.parents[1])]
    words += ["--only", "gpt-fp32-resume3", "--only", INTERLEAVED, "--out-dir", str(out)]
    running = tool.start(*words)

    def first_case() -> list[str]:
        assert running.poll() is None, running.communicate()
        return [line for file in out.rglob("results.jsonl") for line in case_lines(file)]

    wait_until(first_case, 240)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    wait_until(lambda: not processes_with(str(out)), 30)
    (results,) = out.rglob("results.jsonl")
    kept = case_lines(results)
    assert kept
    assert "Traceback" not in err
    assert list(out.rglob("*.intoto.jsonl")) == []

    again = [*words, "--resume"]
    if number == signal.SIGTERM:
        assert running.returncode == 130
        told = next(line for line in err.splitlines() if "Go on with the rest: envbuild " in line)
        command = shlex.split(told.partition("envbuild ")[2])
        assert sorted(command) == sorted(again)
        again = command
    done = json.loads(tool.run(*again, "--json").stdout)
    assert [case["id"] for case in done["cases"]] == ["gpt-fp32-baseline", INTERLEAVED, "gpt-fp32-resume3"]
    assert all(case["passed"] for case in done["cases"])
    assert case_lines(results)[: len(kept)] == kept
    assert results.read_text().count('"type": "resumed"') == 1
    (certificate,) = out.rglob("*.intoto.jsonl")
    assert str(certificate) == done["certificate"]
