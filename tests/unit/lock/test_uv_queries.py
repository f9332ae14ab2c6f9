"""Which needs a lock does not meet: how uv is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from envbuild.lock.checks import uv_queries
from envbuild.lock.checks.uv_queries import Need, contradicted

NEEDS = [
    Need(package={"name": f"user{number}", "version": "1"}, name=f"lib{number % 5}", extras=()) for number in range(20)
]


@pytest.mark.parametrize("unmet", [(), (3,), (3, 7, 12), (0, 5, 10, 15)])
@pytest.mark.parametrize("named", [True, False])
def test_few_questions_find_the_needs_that_are_not_met(
    monkeypatch: pytest.MonkeyPatch, unmet: tuple[int, ...], named: bool
) -> None:
    asked: list[Sequence[Need]] = []

    def explain(plan: Any, question: Sequence[Need], context: Any, what: str) -> str:
        asked.append(question)
        first = next((need for need in question if NEEDS.index(need) in unmet), None)
        if first is None:
            return ""
        return (
            f"Because {first.package['name']}==1 depends on {first.name}<2, we can conclude" if named else "No solution"
        )

    monkeypatch.setattr(uv_queries, "_question", lambda plan, resolution, needs, instead: needs)
    monkeypatch.setattr(uv_queries, "_contradiction", explain)
    any_: Any = None
    found = contradicted(any_, any_, NEEDS, any_, "check")
    assert [NEEDS.index(need) for need, _ in found] == [*unmet]
    assert all(re.search(rf"{need.package['name']}==1", why) for need, why in found if named)
    assert len(asked) <= (2 * len(unmet) + 1 if named else 1 + len(NEEDS))
