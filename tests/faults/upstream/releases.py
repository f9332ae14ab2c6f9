"""Environments with a release of megatron-core, and what the judge says of one case in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from faults.environments import Environment
from faults.upstream.bugs import Bug

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.results import read_results
from envbuild.certify.models import Problem
from envbuild.certify.run.plan import Environment as Planned
from envbuild.certify.run.plan import Subject, make_plan
from envbuild.launch.launchers import Placement
from envbuild.lock.uv.program import uv_program
from envbuild_smoke.plan.reader import parse_plan

CPU = Capabilities(device=Device.CPU)
HERE = Placement.parse("venv")
SUBJECT = Subject(name="n", stack="mcore", base="here", target="cpu", lock_digest="sha256:" + "0" * 64, place=HERE)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in a case: its problems, those of its baseline and those of the run."""

    case: tuple[Problem, ...]
    others: tuple[Problem, ...]
    seconds: float

    def finds(self, check: str) -> bool:
        return any(problem.check == check for problem in self.case)

    @property
    def passed(self) -> bool:
        return not (self.case or self.others)


def with_release(stack: Environment, folder: Path, release: str) -> Environment:
    """A copy of the stack's environment with another release of megatron-core from the index."""
    environment = stack.copy(folder)
    if environment.versions["megatron-core"] == release:
        return environment
    site = environment.site_packages
    shutil.rmtree(site / "megatron")
    shutil.rmtree(next(site.glob("megatron_core-*.dist-info")))
    # From 0.17 on it asks for Python 3.12. Nothing of what the cases import needs that; only the helper of data sets is
    # compiled, and no case has such data.
    command = [uv_program(), "pip", "install", "-q", "--no-deps", "--python-version", "3.12", "--target", site]
    subprocess.run([*command, f"megatron-core=={release}"], check=True)
    # From 0.18 on it imports triton, which a torch for CPUs does not bring.
    install = [uv_program(), "pip", "install", "-q", "--no-deps", "--python", environment.python, "triton"]
    subprocess.run(install, check=True)
    return environment


@cache
def _matrix(name: str) -> tuple[Matrix, dict[str, Case]]:
    matrix = Catalog.open(Path("/nonexistent")).matrix(name)
    return matrix, {case.id: case for case in expand(matrix, name, CPU)}


def case_of(bug: Bug) -> tuple[Matrix, Case, Case]:
    """The matrix of a bug, the baseline of its case and the case; the same where the case is one."""
    matrix, cases = _matrix(bug.matrix)
    case = cases[bug.case]
    return matrix, cases[case.baseline_id], case


def certify(environment: Environment, bug: Bug, scratch: Path) -> Verdict:
    """Train the case of a bug and its baseline, and judge them."""
    matrix, *pair = case_of(bug)
    cases = tuple(dict.fromkeys(pair))
    planned = Planned(capabilities=CPU, driver=Driver.MCORE, versions=environment.versions)
    plan = make_plan(SUBJECT, planned, matrix, cases)
    scratch.mkdir()
    content = json.dumps(plan).encode()
    (scratch / "plan.json").write_bytes(content)
    began = time.monotonic()
    words = [
        environment.python,
        "-m",
        "envbuild_smoke",
        "run",
        "--plan",
        scratch / "plan.json",
        "--out",
        scratch / "out",
    ]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(data_root() / "smoke")}, capture_output=True)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr.decode()
    planned_cases = parse_plan(content)
    results = read_results(scratch / "out" / "results.jsonl", planned_cases)
    verdicts = {verdict.id: verdict for verdict in judge(cases, matrix, results, planned_cases)}
    own = verdicts.pop(bug.case)
    others = [problem for verdict in verdicts.values() for problem in verdict.problems]
    shutil.rmtree(scratch)
    return Verdict(case=own.problems, others=(*others, *run_problems(planned_cases, results)), seconds=seconds)


def described(verdict: Verdict) -> dict[str, object]:
    """A verdict for the record: the first problem of each check."""
    first = {problem.check: problem.text for problem in reversed((*verdict.case, *verdict.others))}
    return {"passed": verdict.passed, "problems": first, "seconds": round(verdict.seconds, 1)}
