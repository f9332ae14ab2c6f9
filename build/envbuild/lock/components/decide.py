"""The step `components`: every component and the training code, the as-of moment, and what is exempt from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Selection
from envbuild.catalog.stack import Component, Driver, Stack
from envbuild.core.errors import UsageError
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.extras import with_former_extras
from envbuild.lock.components.families import with_one_version
from envbuild.lock.components.git_sources import GitSourceReader, forced_sources, marked, with_upstreams_phases
from envbuild.lock.components.models import Chosen, Exemption, GitSources, Lead, Preference
from envbuild.lock.components.preferences import upstream_preferences
from envbuild.lock.components.releases import Releases, find_release, release_has_folder, uploaded_at
from envbuild.lock.components.select import (
    choose,
    choose_anchor,
    deviated,
    earlier,
    lead,
    own_choice,
    upstream_overrides,
)
from envbuild.lock.components.upstream import LLM_COLLECTION, has_folder
from envbuild.lock.components.version_limits import hold_to_cuda, hold_to_declared
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.pins import Ref, VersionRef, parse_pins, parse_ref, unknown_pin
from envbuild.lock.inputs.request import LockInputs

NEMO_TOOLKIT = "nemo-toolkit"
STACKS_FILE = "the stack's file"


def branch_bound(selection: Selection, asked: str | None, pins: Mapping[str, Ref], repositories: Repositories) -> Bound:
    """Up to when branches count, as far as that is known before the anchor is; None: their tips, or not known yet.

    Args:
        asked: text after ``--as-of``; None for the stack's own.
    """
    stack = selection.stack
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
    commit = repositories.at(spec.git).resolve(ref)
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
    selection: Selection,
    asked: str | None,
    pins: Mapping[str, Ref],
    anchor: Chosen | None,
    context: LockContext,
) -> AsOf:
    """The as-of moment, once the anchor is decided.

    Args:
        asked: text after ``--as-of``; None for the stack's own.
    """
    text = asked or _default_as_of(selection, pins, anchor)
    if text == as_of.NOW:
        return as_of.now(context.clock)
    if (day := as_of.parse_date(text)) is not None:
        return as_of.on_day(day, context.clock)
    if anchor is None or text != as_of.RELEASE:
        commit = _as_of_commit(text, selection, context.repositories)
        reason = f"the date of {selection.stack.anchor} {commit.sha[:12]}"
        return AsOf(asked=text, moment=commit.committed_at, reason=reason)
    title = f"{anchor.name} {anchor.commit.describe or anchor.commit.sha[:12]}" if anchor.commit else anchor.asked
    released = anchor.commit.committed_at if anchor.commit else _uploaded(anchor, selection.base, context)
    return as_of.after_release(title, released, timedelta(days=selection.stack.margin_days), context.clock)


def _default_as_of(selection: Selection, pins: Mapping[str, Ref], anchor: Chosen | None) -> str:
    """``now`` for a branch; for a tag, a commit or a version that the user pinned, its release."""
    if anchor is None or anchor.name not in pins:
        return selection.stack.as_of
    ref = pins[anchor.name]
    if anchor.commit is not None:
        return as_of.NOW if anchor.commit.kind is CommitKind.BRANCH else as_of.RELEASE
    return as_of.RELEASE if isinstance(ref, VersionRef) or anchor.specifier.startswith("==") else as_of.NOW


def _uploaded(anchor: Chosen, base: Base, context: LockContext) -> datetime:
    """When the anchor's release was uploaded to the index."""
    with context.reporter.step(f"find the date of {anchor.name} {anchor.specifier}"):
        return uploaded_at(find_release(anchor, base, {}, context))


def own_dates(stack: Stack) -> dict[str, str]:
    """The as-of dates of their own that components have."""
    return {
        name: as_of.timestamp(as_of.end_of(day))
        for name, spec in stack.every_component().items()
        if spec.as_of and (day := as_of.parse_date(spec.as_of))
    }


@dataclass(frozen=True, kw_only=True)
class EffectiveStack:
    """A stack as it holds for the anchor that was chosen.

    Attributes:
        stack: with the components and the driver of its takeover, where that holds.
        leads: whose upstreams decide the companions; the first one wins.
        because: why the driver is what it is.
    """

    stack: Stack
    leads: tuple[Lead, ...]
    because: str

    @property
    def driver(self) -> Driver:
        return self.stack.driver


def effective_stack(
    stack: Stack,
    anchor: Chosen | None,
    pins: Mapping[str, Ref],
    as_of: Bound,
    releases: Releases,
    commits: Mapping[str, str],
) -> EffectiveStack:
    """Decide whether the stack's takeover holds, and read what belongs to the components that lead.

    Args:
        releases: what is known of a lead that is a release.
        commits: older commits to take, by component.

    Raises:
        UsageError: a component that only the takeover brings is pinned, and it does not hold.
    """
    if anchor is None:
        return EffectiveStack(stack=stack, leads=(), because=STACKS_FILE)
    repositories = releases.context.repositories
    own = lead(anchor, releases)
    takeover = stack.takeover
    if takeover is None:
        return EffectiveStack(stack=stack, leads=(own,), because=STACKS_FILE)
    if anchor.commit is not None and anchor.git is not None:
        has_code = has_folder(repositories.at(anchor.git), anchor.commit, takeover.without)
    else:
        has_code = releases.has_folder(anchor, takeover.without)
    if has_code:
        if unused := [name for name in pins if name not in stack.components]:
            raise UsageError(
                f"{', '.join(unused)} is pinned, and is not in the stack with {anchor.at()}",
                why=f"The stack has it only where the anchor has no {takeover.without}, and this one has.",
                fix="Leave the pin out, or choose another anchor.",
            )
        return EffectiveStack(stack=stack, leads=(own,), because=f"{anchor.at()} has {takeover.without}")
    taken = stack.taken_over()
    spec = taken.components[takeover.lead]
    choice = own_choice(takeover.lead, spec, pins.get(takeover.lead), repositories, as_of)
    choice = earlier(choice, commits, repositories)
    other = lead(choice, releases)
    because = f"{anchor.at()} has no {takeover.without}: {takeover.reason}"
    return EffectiveStack(stack=taken, leads=(other, own), because=because)


def commit_without_llm(chosen: Mapping[str, Chosen], driver: Driver, repositories: Repositories) -> str:
    """What driver ``nemo`` misses in a nemo-toolkit from git; empty: nothing, or it is a release."""
    item = chosen.get(NEMO_TOOLKIT)
    if driver is not Driver.NEMO or item is None or item.commit is None or item.git is None:
        return ""
    if has_folder(repositories.at(item.git), item.commit, LLM_COLLECTION):
        return ""
    return f"{item.at()} has no {LLM_COLLECTION}"


def release_without_llm(packages: Mapping[str, Mapping[str, Any]], driver: Driver, context: LockContext) -> str:
    """What driver ``nemo`` misses in the release of nemo-toolkit that was locked; empty: nothing, or it is from git.

    Args:
        packages: the ``[[package]]`` tables of uv.lock by name.
    """
    if driver is not Driver.NEMO:
        return ""
    package = packages.get(NEMO_TOOLKIT)
    if package is None:
        return f"there is no {NEMO_TOOLKIT}"
    if "git" in package["source"] or release_has_folder(package, LLM_COLLECTION, context):
        return ""
    return f"{NEMO_TOOLKIT} {package['version']} has no {LLM_COLLECTION}"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The stack as it holds for its anchor, every component of it, the as-of moment, and what is exempt from it.

    Attributes:
        preferences: versions that upstream tested with, by package.
    """

    effective: EffectiveStack
    chosen: Mapping[str, Chosen]
    as_of: AsOf
    git_sources: GitSources
    exempt: Mapping[str, Exemption]
    preferences: Mapping[str, Preference]


def decide_components(inputs: LockInputs, context: LockContext) -> Decided:
    """Decide every component and the as-of moment.

    Raises:
        ConfigurationError: a ref does not exist, or cannot be used.
        UsageError: a pin or ``--as-of`` is wrong.
        NetworkError: a repository or an index cannot be reached.
    """
    selection, request = inputs.selection, inputs.request
    stack, base = selection.stack, selection.base
    pins = parse_pins(selection.stack_name, stack, request.pins)
    bound = branch_bound(selection, request.as_of, pins, context.repositories)
    anchor = choose_anchor(stack, pins, context.repositories, bound)
    if anchor is not None:
        anchor = earlier(anchor, inputs.commits, context.repositories)
    moment = as_of_moment(selection, request.as_of, pins, anchor, context)
    # Known only now: the companions' branches are as of the moment that follows from the anchor.
    if bound is None and moment.asked != as_of.NOW:
        bound = moment.moment
    dates = own_dates(stack)
    releases = Releases(
        catalog=selection.catalog,
        base=base,
        settings={"exclude-newer": moment.text(), "exclude-newer-package": dates},
        undecided=frozenset(stack.undecided() - set(pins)),
        context=context,
    )
    effective = effective_stack(stack, anchor, pins, bound, releases, inputs.commits)
    chosen = choose(effective.stack, pins, effective.leads, context.repositories, bound, base)
    chosen = with_upstreams_phases(chosen, context.repositories)
    chosen, exempt = hold_to_cuda(chosen, inputs, moment, context)
    dates |= {name: item.until for name, item in exempt.items()}
    dates |= {item.package: item.until for item in inputs.deviations if item.until}
    settings = {"exclude-newer": moment.text(), "exclude-newer-package": dates}
    declarations = Declarations(base, settings, context)
    chosen = with_former_extras(hold_to_declared(effective.stack, chosen, declarations), declarations)
    chosen = deviated(chosen, inputs.deviations)
    preferences = upstream_preferences(effective.leads, base, context)
    chosen = with_one_version(chosen, base, settings, preferences, context)
    sources = _git_sources(inputs, effective, chosen, pins, bound, context)
    return Decided(
        effective=effective,
        chosen=marked(chosen, sources),
        as_of=moment,
        git_sources=sources,
        exempt=exempt,
        preferences=preferences,
    )


def _git_sources(
    inputs: LockInputs,
    effective: EffectiveStack,
    chosen: Mapping[str, Chosen],
    pins: Mapping[str, Ref],
    bound: Bound,
    context: LockContext,
) -> GitSources:
    """What the components from git take from elsewhere themselves, and the pins of it."""
    stack, base = inputs.selection.stack, inputs.selection.base
    others = {name: pin for name, pin in pins.items() if name not in stack.every_component()}
    forced = upstream_overrides(effective.leads, chosen, context.repositories)
    sources = GitSourceReader(
        base=base,
        repositories=context.repositories,
        reporter=context.reporter,
        ruled={canonicalize_name(name) for name in (*stack.overrides_of_all(), *forced, *base.provides)}
        | replaced(inputs.deviations),
        forced=forced_sources(effective.leads, base, context.repositories),
        pins=others,
        as_of=bound,
    ).take(chosen)
    if unknown := others.keys() - sources.in_force.keys():
        known = [*stack.every_component(), *sources.in_force]
        raise unknown_pin(inputs.selection.stack_name, min(unknown), known)
    return sources
