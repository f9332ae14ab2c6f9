"""What is going to be resolved: moments and kept versions."""

from dataclasses import replace
from datetime import date, datetime, timezone
from types import SimpleNamespace

import pytest
from helpers.fake_git import TIP, FakeRepositories, FakeRepository
from helpers.locks import lock_context
from helpers.stack_files import BASE, write_base, write_stack

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import utc_now
from envbuild.catalog.stack import Stack
from envbuild.core.errors import UsageError
from envbuild.git.refs import CommitKind
from envbuild.lock.components.as_of_moment import as_of_moment, branch_bound
from envbuild.lock.components.decide import decide_components
from envbuild.lock.components.select import Chooser
from envbuild.lock.inputs.pins import parse_pins
from envbuild.lock.inputs.request import LockInputs, LockRequest
from envbuild.lock.models import Deviation

NEMO, DEP = "https://x/nemo", "https://x/dep"
MOMENT = datetime(2025, 1, 2, 3, tzinfo=timezone.utc)  # of every commit of a fake repository
RELEASED = datetime(2025, 1, 16, 3, tzinfo=timezone.utc)  # with the margin of a stack that names none


def selection(as_of="now", *, anchor="nemo", **component):
    fields = {"summary": "s", "driver": "nemo", "matrix": "m", "builds": [{"target": "cpu", "bases": ["b"]}]}
    components = {"nemo": component or {"git": NEMO, "ref": "main"}, "dep": {}}
    stack = Stack.model_validate({**fields, "anchor": anchor, "as_of": as_of, "components": components})
    return SimpleNamespace(stack=stack, stack_name="s", base=None)


def moments(chosen, as_of=None, kind=CommitKind.BRANCH, **pins):
    """The bound of the anchor's branch, and the as-of moment."""
    repositories = FakeRepositories(FakeRepository(NEMO, kind=kind))
    refs = parse_pins("s", chosen.stack, pins)
    index = SimpleNamespace(base=None, context=SimpleNamespace(repositories=repositories, clock=utc_now))
    bound = branch_bound(chosen, as_of, refs, repositories)
    anchor = Chooser(pins=refs, as_of=bound, base=None, repositories=repositories).anchor(chosen.stack)
    return bound, as_of_moment(chosen, as_of, refs, anchor, index)


@pytest.mark.parametrize(
    ("stack", "as_of", "bound", "asked", "text"),
    [
        ("now", "2025-01-02", date(2025, 1, 2), "2025-01-02", "2025-01-03T00:00:00Z"),
        ("2025-01-02", None, date(2025, 1, 2), "2025-01-02", "2025-01-03T00:00:00Z"),
        ("2025-01-02", "2024-05-05", date(2024, 5, 5), "2024-05-05", "2024-05-06T00:00:00Z"),
        ("now", "release", None, "release", "2025-01-16T03:00:00Z"),
        ("release", None, None, "release", "2025-01-16T03:00:00Z"),
        ("now", "abcdef0", MOMENT, "abcdef0", "2025-01-02T03:00:00Z"),
    ],
)
def test_moment_of_an_unpinned_branch(stack, as_of, bound, asked, text):
    moment = moments(selection(stack), as_of)
    assert (moment[0], moment[1].asked, moment[1].text()) == (bound, asked, text)


def test_now_is_now():
    bound, moment = moments(selection())
    assert (bound, moment.asked) == (None, "now")
    assert moments(selection("2025-01-02"), "now")[1].asked == "now"


@pytest.mark.parametrize(
    ("pin", "kind", "asked"),
    [
        ("main", CommitKind.BRANCH, "now"),
        ("v1", CommitKind.TAG, "release"),
        (TIP, CommitKind.COMMIT, "release"),
    ],
)
def test_a_pinned_anchor_leads_its_own_date(pin, kind, asked):
    # The stack's own date was for the stack's own anchor.
    bound, moment = moments(selection("2025-01-02"), kind=kind, nemo=pin)
    assert (bound, moment.asked) == (None, asked)


@pytest.mark.parametrize(
    ("as_of", "uploaded", "text"),
    [
        (None, datetime(2025, 6, 1, tzinfo=timezone.utc), "2025-06-15T00:00:00Z"),
        (None, datetime(2024, 6, 1, tzinfo=timezone.utc), "2025-01-16T03:00:00Z"),
        ("release", datetime(2025, 6, 1, tzinfo=timezone.utc), "2025-01-16T03:00:00Z"),
    ],
)
def test_a_release_that_is_pinned_as_well_is_in_reach(monkeypatch, as_of, uploaded, text):
    monkeypatch.setattr("envbuild.lock.components.as_of_moment._uploaded", lambda component, *_: uploaded)
    _, moment = moments(selection(), as_of, kind=CommitKind.TAG, nemo="v1", dep="2.0")
    assert (moment.asked, moment.text()) == ("release", text)
    assert ("dep 2.0 is of" in moment.reason) == (text > "2025-06")


@pytest.mark.parametrize(
    ("as_of", "pins", "bound"),
    [
        (None, {}, None),
        (None, {"nemo": "v1"}, RELEASED),
        ("release", {}, RELEASED),
        ("now", {"nemo": "v1"}, None),
        ("2025-05-05", {"nemo": "v1"}, date(2025, 5, 5)),
    ],
)
def test_branches_of_companions_are_as_of_the_moment_of_the_anchor(tmp_path, as_of, pins, bound):
    write_base(tmp_path)
    components = {"nemo": {"git": NEMO, "ref": "main"}, "dep": {"git": DEP, "ref": "main"}}
    write_stack(tmp_path, "s", components, anchor="nemo", as_of="now")
    chosen = Selection(Catalog.open(tmp_path), "s", BASE, "cpu")
    dep = FakeRepository(DEP)
    repositories = FakeRepositories(FakeRepository(NEMO, kind=CommitKind.TAG if pins else CommitKind.BRANCH), dep)
    inputs = LockInputs.from_request(chosen, LockRequest(pins=pins, as_of=as_of))
    decide_components(inputs, lock_context(tmp_path, repositories))
    assert dep.resolved == [("main", bound)]


def test_companions_are_held_to_the_release_that_deviates(tmp_path, monkeypatch):
    """megatron-core 0.15 declares another Transformer Engine than 0.16, which upstream names; itself it is not held."""
    write_base(tmp_path)
    write_stack(tmp_path, "s", {"lib": {"version": "==2"}, "dep": {}}, as_of="now")
    chosen = Selection(Catalog.open(tmp_path), "s", BASE, "cpu")

    def hold(stack, items, declarations):
        assert items["lib"].specifier == "==1.*"
        return {name: replace(entry, specifier="<9") for name, entry in items.items()}

    monkeypatch.setattr("envbuild.lock.components.decide.hold_to_declared", hold)
    moved = Deviation(package="lib", specifier="==1.*", instead_of="==2", reason="it fails")
    inputs = replace(LockInputs.from_request(chosen, LockRequest()), deviations=(moved,))
    decided = decide_components(inputs, lock_context(tmp_path, FakeRepositories()))
    assert {name: component.specifier for name, component in decided.chosen.items()} == {"lib": "==1.*", "dep": "<9"}


def test_as_of_a_commit_needs_an_anchor_with_a_repository():
    with pytest.raises(UsageError, match="stack s has no anchor"):
        moments(selection(anchor=None), "abcdef0")
    with pytest.raises(UsageError, match="stack s has no anchor"):
        moments(selection(anchor=None), "release")
    with pytest.raises(UsageError, match="nor a commit of nemo"):
        moments(selection(version="==1"), "abcdef0")
    with pytest.raises(UsageError, match="nor a commit of nemo"):
        moments(selection(), "2.0")
    with pytest.raises(UsageError, match="--as-of main is a branch, which moves"):
        moments(selection(), "main")
