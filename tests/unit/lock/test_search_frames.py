"""When a move of the search led nowhere, so that the next one is tried in its place."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.core.errors import EnvbuildError, NetworkError, ResolutionError
from envbuild.git.refs import Commit, CommitKind
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.deviation import Deviation
from envbuild.lock.search import search as module
from envbuild.lock.search.history import has_same_file
from envbuild.lock.search.search import Search, _Frame
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


@pytest.mark.parametrize(
    ("error", "next_commit"),
    [
        (NetworkError("cannot resolve: uv cannot fetch from a git repository"), True),
        (ResolutionError("cannot resolve", why="Failed to build `foo==1.0`"), False),
    ],
)
def test_a_repository_that_gives_nothing_is_not_cured_by_another_release(
    error: EnvbuildError, next_commit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        (Deviation(package="te", instead_of="==2.7", specifier=text, reason="r"),) for text in ("==2.6.*", "==2.5.*")
    )
    older = State(commits={"lead": "a" * 40}, behind=("lead a, 1 commit behind",))
    monkeypatch.setattr(module, "may_deviate", lambda *_: True)
    monkeypatch.setattr(Search, "_moves", lambda _, blame, __: iter((first, second) if "te" in blame.packages else ()))
    monkeypatch.setattr(Search, "_older_states", lambda *_: iter((older,)))
    inputs: Any = SimpleNamespace(selection=None, request=SimpleNamespace(base_named=True))
    reporter = SimpleNamespace(note=lambda _: None)
    search = Search(inputs, cast("Any", None), cast("Any", SimpleNamespace(reporter=reporter)), older=True)
    steps: Any = SimpleNamespace(resolved=None, decided=None, plan=None)

    after_one = search.after(State(), steps, ResolutionError("no te ==2.7").about("te"))
    assert after_one == State().with_move(first)
    after_two = search.after(after_one, steps, error)
    assert after_two == (older if next_commit else State().with_move(second))


def test_an_older_commit_with_a_later_date_is_no_days_behind() -> None:
    def at(day: int) -> Commit:
        when = datetime(2026, 1, day, tzinfo=timezone.utc)
        return Commit(sha="a" * 40, committed_at=when, kind=CommitKind.BRANCH, name="main")

    assert module._distance(at(2), at(1), 1) == "1 commit and 0 days behind the tip"
    assert module._distance(at(1), at(2), 2) == "2 commits and 1 day behind the tip"


def test_an_extra_for_another_cuda_is_tried_before_other_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    def moves(name: str) -> Any:
        return lambda _, package: iter([(Deviation(package=package, instead_of="x", specifier=name, reason="r"),)])

    class Fake:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        without_extra, likely, relaxed, earlier = map(moves, ("without", "likely", "relaxed", "earlier"))

    monkeypatch.setattr(module, "Candidates", Fake)
    unused: Any = None
    steps: Any = SimpleNamespace(decided=())
    found = Search(unused, unused, unused, older=False)._moves(blame("cuda-mixed", "numba-cuda"), steps)
    assert [part.specifier for move in found for part in move] == ["without", "likely", "earlier"]


@pytest.mark.parametrize(
    ("tip", "older", "same"),
    [
        ({"src/a.py": "x"}, {"src/a.py": "x"}, True),
        ({"src/a.py": "x"}, {"src/a.py": "y"}, False),
        ({"src/a.py": "x"}, {"a.py": "x"}, False),
        ({}, {}, False),
    ],
)
def test_a_file_that_is_not_in_the_tree_is_not_the_same(tip: dict[str, str], older: dict[str, str], same: bool) -> None:
    trees: Any = {"tip": tip, "older": older}
    repository: Any = SimpleNamespace(read_files=lambda at, paths: {path: trees[at].get(path) for path in paths})
    assert has_same_file("a.py", cast("Any", "tip"), cast("Any", "older"), repository) is same
