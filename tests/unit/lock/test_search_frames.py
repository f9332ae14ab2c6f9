"""When a move of the search led nowhere, so that the next one is tried in its place."""

from __future__ import annotations

import pytest

from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.search.search import _Frame
from envbuild.lock.search.state import Blame, State


def blame(code: str, *packages: str) -> Blame:
    findings = (CheckFinding(code=code, what="w", fix="f", packages=packages),)
    return Blame(error=LockRefusedError("w", findings=findings), packages=packages, signature=f"{code} {packages}")


@pytest.mark.parametrize(
    ("code", "packages", "no_better"),
    [
        ("import", ("lib",), True),
        ("install", ("brought",), True),
        ("install", ("brought", "torch"), False),
        ("install", (), False),
        ("import", ("brought",), False),
    ],
)
def test_move_that_led_nowhere(code: str, packages: tuple[str, ...], no_better: bool) -> None:
    frame = _Frame(State(), blame("import", "lib"), iter(()), frozenset({"torch", "lib"}))
    assert frame.is_no_better(blame(code, *packages)) is no_better


def test_after_what_did_not_resolve_every_package_is_new() -> None:
    assert not _Frame(State(), blame("import", "lib"), iter(())).is_no_better(blame("install", "brought"))
