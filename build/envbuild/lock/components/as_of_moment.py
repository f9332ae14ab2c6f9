"""The as-of moment: what ``--as-of``, the stack's file or a pin of the anchor means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from envbuild.catalog.catalog import Selection
from envbuild.catalog.stack import Component, Stack
from envbuild.core.errors import ResolutionError, UsageError
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.releases import find_release, uploaded_at
from envbuild.lock.components.select import Chooser
from envbuild.lock.context import Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.pins import Ref, VersionRef, parse_ref
from envbuild.lock.uv.package_index import PackageIndex


def branch_bound(selection: Selection, asked: str | None, pins: Mapping[str, Ref], repositories: Repositories) -> Bound:
    """Up to when branches count, as far as that is known before the anchor is; None: their tips, or not known yet.

    Args:
        asked: text after ``--as-of``; None for the stack's own.
    """
    stack = selection.stack
    # The stack's date is for the stack's own anchor; what it is for a pinned one, as_of_moment finds out.
    text = asked or (as_of.NOW if stack.anchor in pins else stack.as_of)
    if text in (as_of.NOW, as_of.RELEASE):
        return None
    return as_of.parse_date(text) or _as_of_commit(text, selection, repositories).committed_at


def _as_of_commit(text: str, selection: Selection, repositories: Repositories) -> Commit:
    """The commit of the anchor's repository that ``--as-of`` names."""
    ref, spec = parse_ref(text), _anchor_spec(text, selection)
    if not isinstance(ref, GitRef) or spec.git is None:
        raise UsageError(
            f"--as-of {text} is neither a date nor a commit of {selection.stack.anchor}",
            why="It takes a date (YYYY-MM-DD), 'now', 'release', or a commit of the anchor's repository.",
            fix="Correct it.",
        )
    commit = repositories.open(spec.git).resolve(ref)
    if commit.kind is CommitKind.BRANCH:
        raise UsageError(
            f"--as-of {text} is a branch, which moves",
            why=f"It is at {commit.sha[:12]} now, and a lock as of it would be another one tomorrow.",
            fix=f"Name the commit: --as-of {commit.sha[:12]}, a date, 'release' or 'now'.",
        )
    return commit


def _anchor_spec(text: str, selection: Selection) -> Component:
    if selection.stack.anchor is None:
        raise UsageError(
            f"--as-of {text} is not a date, and stack {selection.stack_name} has no anchor for anything else",
            why="'release' and commits count from the date of the stack's anchor.",
            fix="Write a date as YYYY-MM-DD, or 'now'.",
        )
    return selection.stack.components[selection.stack.anchor]


def as_of_moment(
    selection: Selection, asked: str | None, pins: Mapping[str, Ref], anchor: Chosen | None, index: PackageIndex
) -> AsOf:
    """The as-of moment, once the anchor is decided.

    Args:
        asked: text after ``--as-of``; None for the stack's own.
        index: asked for dates of releases.
    """
    text, clock = asked or _default_as_of(selection, pins, anchor), index.context.clock
    if text == as_of.NOW:
        return as_of.now(clock)
    if (day := as_of.parse_date(text)) is not None:
        return as_of.on_day(day, clock)
    if anchor is None or text != as_of.RELEASE:
        commit = _as_of_commit(text, selection, index.context.repositories)
        reason = f"the date of {selection.stack.anchor} {commit.sha[:12]}"
        return AsOf(asked=text, moment=commit.committed_at, reason=reason)
    title = f"{anchor.name} {anchor.commit.title}" if anchor.commit else anchor.asked
    released = anchor.commit.committed_at if anchor.commit else _uploaded(anchor, index)
    # With --as-of release the anchor's date holds, whatever else is pinned.
    if asked is None:
        others = _pinned(selection.stack, pins, anchor, index)
        title, released = max([(title, released), *others], key=lambda release: release[1])
    return as_of.after_release(title, released, timedelta(days=selection.stack.margin_days), clock)


def _default_as_of(selection: Selection, pins: Mapping[str, Ref], anchor: Chosen | None) -> str:
    """``now`` for a branch; for a tag, a commit or a version that the user pinned, its release."""
    if anchor is None or anchor.name not in pins:
        return selection.stack.as_of
    ref = pins[anchor.name]
    if anchor.commit is not None:
        return as_of.NOW if anchor.commit.kind is CommitKind.BRANCH else as_of.RELEASE
    return as_of.RELEASE if isinstance(ref, VersionRef) or anchor.specifier.startswith("==") else as_of.NOW


def _pinned(
    stack: Stack, pins: Mapping[str, Ref], anchor: Chosen, index: PackageIndex
) -> Iterator[tuple[str, datetime]]:
    """The other releases that the user pins, with their dates: a moment before them would refuse them."""
    chooser = Chooser(pins=pins, as_of=None, base=index.base, repositories=index.context.repositories)
    components = stack.every_component()
    for name, pin in pins.items():
        if name == anchor.name or name not in components or not isinstance(pin, VersionRef):
            continue
        # A release that is not there is reported where it is taken.
        with contextlib.suppress(ResolutionError):
            yield f"{name} {pin.version}", _uploaded(chooser.own_choice(name, components[name]), index)


def _uploaded(component: Chosen, index: PackageIndex) -> datetime:
    """When a component's release was uploaded to the index."""
    with index.context.reporter.step(f"find the date of {component.name} {component.specifier}"):
        return uploaded_at(find_release(component, index))


def own_dates(components: Mapping[str, Component]) -> dict[str, str]:
    """The as-of dates of their own that components have."""
    return {
        name: as_of.timestamp(as_of.end_of(day))
        for name, spec in components.items()
        if spec.as_of and (day := as_of.parse_date(spec.as_of))
    }
