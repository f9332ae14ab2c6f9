"""When a move of the search led nowhere, so that the next one is tried in its place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.data import data_root
from envbuild.core.errors import BuildError, EnvbuildError, NetworkError, ResolutionError
from envbuild.core.progress import SilentReporter
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.request import LockInputs, LockRequest
from envbuild.lock.models import Deviation
from envbuild.lock.outcome import Failure
from envbuild.lock.search import search as module
from envbuild.lock.search.search import Search, _Frame
from envbuild.lock.search.state import Blame
from envbuild.lock.uv.program import NoUploadTimesError


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
    frame = _Frame((), blame("import", "lib"), iter(()), frozenset({"torch", "lib"}))
    assert frame.is_no_better(blame(code, *packages)) is no_better


def test_after_what_did_not_resolve_every_package_is_new() -> None:
    assert not _Frame((), blame("import", "lib"), iter(())).is_no_better(blame("install", "brought"))


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (NetworkError("cannot resolve: uv cannot fetch from a git repository").at_upstream(), True),
        (ResolutionError("cannot resolve", why="Failed to build `foo==1.0`"), False),
    ],
)
def test_a_repository_that_gives_nothing_is_not_cured_by_another_release(
    error: EnvbuildError, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        (Deviation(package="te", instead_of="==2.7", specifier=text, reason="r"),) for text in ("==2.6.*", "==2.5.*")
    )
    monkeypatch.setattr(Search, "_moves", lambda _, blame, __: iter((first, second) if "te" in blame.packages else ()))
    inputs = inputs_of(*OPEN)
    search = Search(inputs, None, cast("Any", SimpleNamespace(reporter=SimpleNamespace(note=lambda _: None))))

    after_one = search.after(Failure(inputs=inputs, error=ResolutionError("no te ==2.7").about("te")))
    assert isinstance(after_one, LockInputs)
    assert after_one.deviations == first
    after_two = search.after(Failure(inputs=after_one, error=error))
    if isinstance(after_two, Failure):
        assert ends
        assert type(after_two.error) is type(error)
        assert "Tried 2 times" in after_two.error.why
    else:
        assert (after_two.deviations, ends) == (second, False)


def test_a_finding_that_nothing_cures_is_what_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier attempt seemed to come further: no other base is tried after it."""
    move = (Deviation(package="te", instead_of="==2.7", reason="r"),)
    monkeypatch.setattr(Search, "_moves", lambda *_: iter((move,)))
    monkeypatch.setattr(Search, "_settled", lambda _, blame, __: blame.findings)
    inputs = inputs_of(*OPEN)
    search = Search(inputs, None, cast("Any", SimpleNamespace(reporter=SimpleNamespace(note=lambda _: None))))
    gone = ResolutionError("te cannot be taken from its repository").about("te")
    following = search.after(Failure(inputs=inputs, error=gone, resolved=RESOLVED))
    assert isinstance(following, LockInputs)
    drift = CheckFinding(code="api-drift", what="w", fix="f", packages=("megatron-core",))
    refused = LockRefusedError("refused", findings=[drift])
    last = search.after(Failure(inputs=following, error=refused, resolved=RESOLVED))
    assert isinstance(last, Failure)
    assert (last.settled, last.error.what) == (True, "refused")


def inputs_of(stack: str, base: str, **changes: Any) -> LockInputs:
    request = LockRequest(as_of=changes.pop("as_of", None))
    selection = Selection(Catalog.open(data_root()), stack, base, "h200")
    return replace(LockInputs.from_request(selection, request), **changes)


PINNED, OPEN = ("mcore", "debian12-cu130"), ("nemo", "ubuntu2404-cu130")
LOCK: Any = SimpleNamespace(lock=SimpleNamespace(inputs=SimpleNamespace(digest="", as_of_asked="2026-01-01")))
RESOLVED: Any = SimpleNamespace(resolution=SimpleNamespace(pins={"mamba-ssm": "2.3"}))
NO_TIMES = NoUploadTimesError("the index has no upload times")
PINS_STAY = {"pins_stay": True, "deviations": (Deviation(package="te", instead_of="x", reason="r"),)}


@pytest.mark.parametrize(
    ("inputs", "failure", "following"),
    [
        (inputs_of(*PINNED, previous=LOCK), {"error": ResolutionError("gone")}, {"previous": None}),
        (inputs_of(*PINNED), {"error": ResolutionError("no solution")}, None),
        (
            inputs_of(*PINNED, previous=LOCK),
            {"error": NO_TIMES, "all_undated": True},
            {"no_as_of": True, "previous": None},
        ),
        (inputs_of(*PINNED), {"error": NO_TIMES, "undated": frozenset({"a"})}, {"undated": frozenset({"a"})}),
        (inputs_of(*PINNED, undated=frozenset({"a"})), {"error": NO_TIMES, "undated": frozenset({"a"})}, None),
        (inputs_of(*PINNED, no_as_of=True), {"error": NO_TIMES}, None),
        (inputs_of(*PINNED, as_of="2026-01-01"), {"error": NO_TIMES}, None),
        (inputs_of(*OPEN), {"error": NO_TIMES}, None),
        (
            inputs_of(*PINNED, stays={"a": "1"}),
            {"error": ResolutionError("w"), "resolved": RESOLVED, "to_compile": frozenset({"mamba-ssm"})},
            {"compiled": frozenset({"mamba-ssm"}), "stays": {"a": "1", "mamba-ssm": "2.3"}},
        ),
        (inputs_of(*OPEN, **PINS_STAY), {"error": BuildError("w")}, {"pins_stay": False, "deviations": ()}),
        (inputs_of(*OPEN, **PINS_STAY), {"error": NetworkError("down")}, None),
    ],
)
def test_what_is_tried_before_other_releases(
    inputs: LockInputs, failure: dict[str, Any], following: dict[str, Any] | None
) -> None:
    search = Search(inputs, None, cast("Any", SimpleNamespace(reporter=SilentReporter())))
    failed = Failure(inputs=inputs, **failure)
    actual = search.after(failed)
    if following is None:
        assert actual == failed
    else:
        assert isinstance(actual, LockInputs)
        assert {name: getattr(actual, name) for name in following} == following


def test_an_extra_for_another_cuda_is_tried_before_other_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    def moves(name: str) -> Any:
        return lambda _, package: iter([(Deviation(package=package, instead_of="x", specifier=name, reason="r"),)])

    class Fake:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        without_extra, likely, relaxed, earlier = map(moves, ("without", "likely", "relaxed", "earlier"))

    monkeypatch.setattr(module, "Candidates", Fake)
    unused: Any = None
    failure: Any = SimpleNamespace(decided=())
    inputs = inputs_of(*OPEN)
    actual = Search(inputs, unused, unused)._moves(blame("cuda-mixed", "numba-cuda"), failure)
    assert [part.specifier for move in actual for part in move] == ["without", "likely", "earlier"]
