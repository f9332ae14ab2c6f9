"""Real bugs are found in the release that has them, by the check that is named; the release without them passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.harness import Harness
from faults.upstream.bugs import BUGS, NOT_CAUGHT, Bug
from faults.upstream.record import Record
from faults.upstream.releases import case_of, certify, with_release

from envbuild.certify.models import CHECKS

ON_CPU = [bug for bug in BUGS if bug.device == "cpu"]


def test_table_names_cases_checks_and_threads() -> None:
    assert len(BUGS) >= 12
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    assert {bug.check for bug in BUGS} <= set(CHECKS)
    assert all(bug.release != bug.fixed for bug in BUGS)
    assert all(entry.why for entry in NOT_CAUGHT)


@pytest.mark.parametrize("bug", ON_CPU, ids=lambda bug: bug.id)
def test_case_is_in_a_shipped_matrix(bug: Bug) -> None:
    _, baseline, case = case_of(bug)
    assert baseline.is_baseline
    assert case.id == bug.case


@pytest.fixture(scope="session")
def record(harness: Harness) -> Record:
    """What was found in this session; ENVBUILD_UPSTREAM_RECORD names a file for it."""
    return Record(harness.stack)


@pytest.mark.fault
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.id, marks=pytest.mark.slow if bug.quick else pytest.mark.soak) for bug in ON_CPU],
)
def test_bug_is_found_where_it_is_and_nowhere_else(harness: Harness, record: Record, bug: Bug, tmp_path: Path) -> None:
    buggy = with_release(harness.stack, harness.scratch / f"{bug.id}-buggy", bug.release)
    before = certify(buggy, bug, tmp_path / "buggy")
    if isinstance(bug.fixed, str):
        fixed = with_release(harness.stack, harness.scratch / f"{bug.id}-fixed", bug.fixed)
    else:
        fixed = buggy.copy(harness.scratch / f"{bug.id}-fixed")
        for edit in bug.fixed:
            fixed.edit(edit)
    after = certify(fixed, bug, tmp_path / "fixed")
    record.add(bug, before, after)
    buggy.remove()
    fixed.remove()
    assert before.finds(bug.check), before
    assert after.passed, after
