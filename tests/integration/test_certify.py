"""The judge on real training: what megatron-core trains wrongly is caught; an interrupted run is resumed."""

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
from faults import environments
from faults.environments import new_file
from helpers.processes import alive, wait_until

from envbuild.catalog.catalog import Selection
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.judge import judge
from envbuild.certify.judge.results import Results, read_results
from envbuild.certify.models import CaseVerdict
from envbuild.certify.run.plan import Environment, Subject, make_plan
from envbuild.launch.launchers import Placement
from envbuild.lock.lockfile import LockDirectory
from envbuild.sync.zipapp import smoke_bytes
from envbuild_smoke.plan.reader import parse_plan

BASELINE, INTERLEAVED = "gpt-fp32-baseline", "gpt-fp32-pp2-vp2"
BATCHED, GATHERED = f"{INTERLEAVED}-bp2p", "gpt-fp32-tp2-gathered"
WRONG_AND_RIGHT = """
[[cases]]
model = "gpt"

[[cases]]
model = "gpt"
pipeline = 2
virtual_pipeline = 2
overlap_p2p_comm = [true, false]

[[cases]]
model = "gpt"
tensor = 2
parallel_output = false
"""
SUBJECT = Subject(name="n", stack="mcore", base="b", target="cpu", lock_digest="l", place=Placement.parse("venv"))


def run_cases(
    python: Path, folder: Path, selection: Selection, names: tuple[str, ...], changes: dict[str, Any]
) -> tuple[dict[str, CaseVerdict], Results]:
    """Train cases of certify-quick; ``changes`` are keys of the plan, or of the settings of the last case."""
    matrix = selection.catalog.matrix("certify-quick")
    capabilities = Capabilities.for_selection(selection)
    cases = tuple(case for case in expand(matrix, "certify-quick", capabilities) if case.id in names)
    environment = Environment(capabilities=capabilities, driver=selection.stack.driver)
    plan: dict[str, Any] = make_plan(SUBJECT, environment, matrix, cases)
    for name, value in changes.items():
        (plan if name in plan else plan["cases"][-1]["settings"])[name] = value
    content = json.dumps(plan).encode()
    (folder / "plan.json").write_bytes(content)
    (folder / "smoke.pyz").write_bytes(smoke_bytes())
    command = [python, folder / "smoke.pyz", "run", "--plan", folder / "plan.json", "--out", folder / "out"]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    planned = parse_plan(content)
    results = read_results(folder / "out" / "results.jsonl", planned)
    return {verdict.id: verdict for verdict in judge(cases, matrix, results, planned)}, results


@pytest.mark.slow
def test_certify_known_wrong_cases_fail_and_the_rest_is_certified(
    stack_python: Path, selection: Selection, mcore_lock: LockDirectory, site_cache: Path, tmp_path: Path
) -> None:
    """megatron-core's defaults for two interleaved stages, and its loss of gathered logits."""
    shutil.copytree(mcore_lock.path, tmp_path / "lockfiles" / "mcore" / mcore_lock.path.name)
    tool, matrices = Tool(tmp_path, site_cache), tmp_path / "envs" / "matrices"
    matrices.mkdir(parents=True)
    head = selection.catalog.path("matrices", "certify-quick").read_text().partition("[[cases]]")[0]
    (matrices / "mixed.toml").write_text(head + WRONG_AND_RIGHT)
    words = ["certify", "--stack", "mcore", "--target", "cpu", "--in", "venv", "--venv", str(stack_python.parents[1])]
    words += ["--out-dir", str(tmp_path / "out"), "--json"]

    refused = json.loads(tool.run(*words, "--matrix", "known-wrong", status=8).stdout)["error"]
    assert (refused["exit_code"], refused["reason"]) == (8, "known-wrong")

    done = json.loads(tool.run(*words, "--matrix", "mixed", "--run-known-wrong").stdout)
    assert [case["id"] for case in done["cases"]] == [BASELINE, INTERLEAVED]
    cases = {case["id"]: case for entry in done["not_vouched"] for case in entry["cases"]}
    assert {name: case["result"] for name, case in cases.items()} == {BATCHED: "failed", GATHERED: "failed"}
    # It "trains", and the loss falls. Only the comparison shows it, at once.
    for case in cases.values():
        assert case["problem"].startswith("parity-loss: step 1: loss expected 6.")


@pytest.mark.slow
def test_certify_finds_a_file_that_was_changed_with_its_record_and_compares_recipes(
    stack_python: Path, mcore_lock: LockDirectory, site_cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(mcore_lock.path, tmp_path / "lockfiles" / "mcore" / mcore_lock.path.name)
    tool = Tool(tmp_path, site_cache)
    environment = environments.Environment(stack_python.parents[1]).copy(tmp_path / "venv")
    words = ["certify", "--stack", "mcore", "--target", "cpu", "--in", "venv", "--venv", "venv"]
    words += ["--only", "gpt-fp32-tp2", "--json"]
    certified = json.loads(tool.run(*words).stdout)
    assert [case["id"] for case in certified["cases"]] == [BASELINE, "gpt-fp32-tp2"]

    recipe = "llama3_8b_pretrain_2gpu_h100_bf16_config"
    # Without --venv, which has no effect there.
    about = [*words[:7], *words[9:]]
    compared = json.loads(tool.run(*about, "--against", recipe).stdout)
    states = {field["name"]: field["state"] for field in compared["fields"]}
    assert "not covered" in states.values()
    assert states["model.tensor_model_parallel_size"] == "covered"
    assert states["model.rotary_base"] == "unknown"

    file = "megatron/core/package_info.py"
    new_file(environment.site_packages / file, (environment.site_packages / file).read_bytes() + b"\n")
    environment.record(file)
    error = json.loads(tool.run(*words, "--fresh", status=7).stdout)["error"]
    assert [problem["check"] for problem in error["problems"]] == ["environment"]
    assert error["problems"][0]["text"].startswith("megatron-core: its RECORD lists other files")


@pytest.mark.slow
def test_certify_versions_that_differ_from_the_lock_are_findings(
    stack_python: Path, selection: Selection, tmp_path: Path
) -> None:
    wrong = {"expected_versions": {"megatron-core": "0.0.1", "torch": "0.0.1"}}
    _, results = run_cases(stack_python, tmp_path, selection, (BASELINE,), wrong)
    findings = {(finding.code, finding.package, finding.expected) for finding in results.findings}
    assert {("version-mismatch", package, "0.0.1") for package in wrong["expected_versions"]} <= findings


def processes_with(text: str) -> list[int]:
    """Who has it on the command line."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return [pid for pid in pids if alive(pid)]


def case_lines(results: Path) -> list[str]:
    """Whole lines about cases; none where nothing was written yet."""
    with contextlib.suppress(FileNotFoundError):
        return [line for line in results.read_text().splitlines(keepends=True) if '"type": "case"' in line]
    return []


@pytest.mark.slow
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
    _, err = running.communicate(timeout=300)
    wait_until(lambda: not processes_with(str(out)), 30)
    (results,) = out.rglob("results.jsonl")
    kept = case_lines(results)
    assert kept
    assert "Traceback" not in err
    assert list(out.rglob("*.intoto.jsonl")) == []

    again = [*words, "--resume"]
    if number == signal.SIGTERM:
        assert running.returncode == 130
        line = next(line for line in err.splitlines() if "Resume: envbuild " in line)
        command = shlex.split(line.partition("envbuild ")[2])
        assert sorted(command) == sorted(again)
        again = command
    done = json.loads(tool.run(*again, "--json").stdout)
    assert [case["id"] for case in done["cases"]] == ["gpt-fp32-baseline", INTERLEAVED, "gpt-fp32-resume3"]
    assert all(case["passed"] for case in done["cases"])
    assert case_lines(results)[: len(kept)] == kept
    assert results.read_text().count('"type": "resumed"') == 1
    (certificate,) = out.rglob("*.intoto.jsonl")
    assert str(certificate) == done["certificate"]
