"""Every fault of the catalogue is found by the check that is named there; the same run without it passes."""

from __future__ import annotations

import pytest
from faults.catalogue import FAULTS
from faults.harness import CANNOT_RUN, FAILED, PASSED, REFUSED, Harness
from faults.kinds import Edit, Fault, Scenario
from faults.record import Record

# Checks that are errors have exit codes of their own.
STATUSES = {"ResultsRefusedError": REFUSED, "CertificationCannotRunError": CANNOT_RUN}
each_fault = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.id, marks=pytest.mark.slow if fault.quick else pytest.mark.soak)
        for fault in FAULTS
        if not isinstance(fault.plant, Scenario)
    ],
)


@pytest.mark.fault
@each_fault
def test_fault_is_found_by_the_check_that_is_named(harness: Harness, record: Record, fault: Fault) -> None:
    case, baseline = harness.cases_of(fault)
    where = {"case": case.id, "baseline": baseline.id, "run": None}[fault.at]
    outcome = harness.planted(fault)
    caught = outcome.finds(fault, where)
    record.add(fault, caught=caught, checks=outcome.checks(), seconds=outcome.seconds)
    assert caught, f"{outcome.checks()}: {outcome.document}\n{outcome.words}"
    assert outcome.status == STATUSES.get(fault.check, FAILED), outcome.words
    if isinstance(fault.plant, Edit):
        # A wheel that was built with it agrees with its RECORD: nothing but the named check could find it.
        assert outcome.problems(None) == []


@pytest.mark.fault
@each_fault
def test_same_run_without_the_fault_passes(harness: Harness, fault: Fault) -> None:
    outcome = harness.healthy(fault)
    assert outcome.status == PASSED, f"{outcome.checks()}: {outcome.document}\n{outcome.words}"
