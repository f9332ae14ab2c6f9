"""Clashing pins are explained once in a search."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.core.errors import ResolutionError
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.models import Deviation
from envbuild.lock.resolve import resolve

MOVED = (Deviation(package="lib", instead_of="==2.0", reason="r"),)


@pytest.mark.parametrize(
    ("searches", "deviations", "fallback_from", "is_explained"),
    [
        (True, (), "", True),
        (True, MOVED, "", False),
        (True, (), "debian12", False),
        # Where nothing else is tried, the failure on another base is the one that is raised.
        (False, (), "debian12", True),
    ],
)
def test_only_the_first_failure_of_a_search_is_explained(
    searches: bool,
    deviations: tuple[Deviation, ...],
    fallback_from: str,
    is_explained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "may_deviate", lambda *_: searches, raising=False)
    monkeypatch.setattr(resolve, "explain_pins", lambda *_: ResolutionError("explained"))
    request = LockRequest(fallback_from=fallback_from)
    inputs = SimpleNamespace(previous=None, selection=None, request=request, deviations=deviations)
    plan = cast("Any", SimpleNamespace(inputs=inputs))
    with pytest.raises(ResolutionError) as caught, resolve._explained(plan, cast("Any", None)):
        raise ResolutionError("failed")
    assert caught.value.what == ("explained" if is_explained else "failed")
