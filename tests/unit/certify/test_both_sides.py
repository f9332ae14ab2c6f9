"""What the planner accepts, the smoke runner accepts, and the other way round."""

from __future__ import annotations

import dataclasses
import json

from helpers.matrices import six_layouts
from helpers.rows import rows
from hypothesis import HealthCheck, given, settings

from envbuild.catalog.models import CaseSpec, Driver, Matrix
from envbuild.certify.cases import ResolvedRow
from envbuild.certify.cases.rules import broken_rules
from envbuild.certify.run.plan import Expected, Subject, make_plan
from envbuild_smoke.plan.models import PlanError
from envbuild_smoke.plan.reader import parse_plan

SUBJECT = Subject(name="n", stack="s", base="b", target="t", lock_digest="l")
SIX = six_layouts()
# What only the planner knows of: the lock's packages, and what can be run and says nothing or computes something else.
ONLY_HERE = ("it needs the package", "must be at least 2 x tensor", "needs overlap_p2p_comm (with batched sends")


def matrix_of(row: ResolvedRow) -> Matrix:
    return SIX.model_copy(update={"models": {"m": row.model}, "training": row.training})


def with_baseline(row: ResolvedRow) -> list[ResolvedRow]:
    """The row and its baseline, which is there once where the row is a baseline itself."""
    plain = CaseSpec(model="m", precision=row.spec.precision, global_batch_size=row.spec.global_batch_size)
    baseline = dataclasses.replace(row, spec=plain)
    return [row] if row.case.is_baseline else [baseline, row]


def refused_here(row: ResolvedRow) -> list[str]:
    found = [rule.text for each in with_baseline(row) for rule in broken_rules(each)]
    return [text for text in found if not any(words in text for words in ONLY_HERE)]


def refused_there(row: ResolvedRow) -> str:
    plan = make_plan(
        subject=SUBJECT,
        ground=row.ground,
        driver=Driver.MCORE,
        matrix=matrix_of(row),
        cases=tuple(each.case for each in with_baseline(row)),
        expected=Expected(),
    )
    try:
        parse_plan(json.dumps(plan).encode())
    except PlanError as error:
        return str(error)
    return ""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=rows())
def test_both_sides_refuse_the_same(row):
    here, there = refused_here(row), refused_there(row)
    assert bool(here) == bool(there), (here, there)
