"""A plan of the quick matrix on the CPU, and results of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from helpers.fake_runner import observed_of, results_of, write
from helpers.matrices import six_layouts

from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.results import Results, read_results
from envbuild.certify.run.plan import Environment, Subject, make_plan
from envbuild.core.digests import sha256_bytes
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Case as PlannedCase
from envbuild_smoke.plan.models import Model, Plan
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import Observed

MATRIX = six_layouts()
CPU = Capabilities(device=Device.CPU)
CASES = expand(MATRIX, "six", CPU)
SUBJECT = Subject(
    name="n",
    stack="mcore",
    base="debian12",
    target="cpu",
    lock_digest=sha256_bytes(b"lock"),
    oci_digest=sha256_bytes(b"oci"),
    sqsh_digest=sha256_bytes(b"sqsh"),
)
TP2, BASELINE = "gpt-fp32-tp2", "gpt-fp32-baseline"


def plan_of(*, subject: Subject = SUBJECT, cases: tuple[Case, ...] = CASES, **changes: Any) -> dict[str, Any]:
    """The plan; ``changes`` are its keys."""
    plan = make_plan(subject, Environment(capabilities=CPU, driver=Driver.MCORE), MATRIX, cases)
    return {**plan, **changes}


def with_case(case_id: str, **changes: Any) -> tuple[Case, ...]:
    """The cases, one of them changed."""
    return tuple(dataclasses.replace(case, **changes) if case.id == case_id else case for case in CASES)


def bytes_of(plan: dict[str, Any]) -> bytes:
    return json.dumps(plan).encode()


def typed(plan: dict[str, Any]) -> Plan:
    """The plan as it is read."""
    return parse_plan(bytes_of(plan))


def observed(case: PlannedCase, model: Model, **changes: Any) -> Observed:
    """What a driver reports that built a case; ``changes`` are its keys."""
    reported = {**observed_of(dataclasses.asdict(case), dataclasses.asdict(model)), **changes}
    return read_object(Observed, reported, "observed")


def lines_of(plan: dict[str, Any], **faults: Any) -> list[dict[str, Any]]:
    return results_of(bytes_of(plan), **faults)


def line(lines: list[dict[str, Any]], case: str, repeat: int = 1) -> dict[str, Any]:
    """The line of a case."""
    return next(line for line in lines if line.get("case") == case and line["repeat"] == repeat)


def read(path: Path, plan: dict[str, Any], lines: list[dict[str, Any]], **options: Any) -> Results:
    """The lines, written and read."""
    write(path, lines)
    return read_results(path, typed(plan), **options)
