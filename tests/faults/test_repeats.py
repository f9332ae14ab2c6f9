"""Healthy repeats: the same environment again and again, without a false alarm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faults.harness import PASSED, Harness
from faults.record import Record

REPEATS = 30


@pytest.mark.soak
def test_healthy_repeats_of_the_quick_matrix_raise_no_alarm(harness: Harness, record: Record) -> None:
    outcome = harness.certify(harness.stack, "certify-quick", "--repeat", str(REPEATS))
    repeats: dict[str, Any] = {"matrix": "certify-quick", "count": REPEATS, "seconds": round(outcome.seconds, 1)}
    repeats["alarms"] = outcome.checks() if outcome.status != PASSED else []
    repeats["cases"] = spreads(outcome.document["cases"]) if outcome.status == PASSED else {}
    record.add_repeats(repeats)
    assert outcome.status == PASSED, f"{outcome.checks()}: {outcome.words}"
    assert all(case["repeats"] == REPEATS for case in repeats["cases"].values())


def spreads(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """By case: how far its repeats are from the baseline at most, and how many different numbers they gave."""
    by_case: dict[str, Any] = {}
    for name in dict.fromkeys(case["id"] for case in cases):
        repeats = [case for case in cases if case["id"] == name]
        digits = {json.dumps([[step["loss"], step["grad_norm"]] for step in case["steps"]]) for case in repeats}
        differences = [case["largest_relative_difference"] for case in repeats]
        by_case[name] = {
            "repeats": len(repeats),
            "different_numbers": len(digits),
            "largest_relative_difference": {
                key: max((difference[key] for difference in differences if difference[key] is not None), default=None)
                for key in ("loss", "grad_norm", "weights")
            },
            "tolerance": repeats[0]["tolerance"],
            "seconds": {"least": min(c["seconds"] for c in repeats), "most": max(c["seconds"] for c in repeats)},
        }
    return by_case
