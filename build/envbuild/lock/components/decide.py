"""The step `components`: every component and the training code, the as-of moment, and what is exempt from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envbuild.catalog.stack import Driver, Stack
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.as_of_moment import as_of_moment, branch_bound, own_dates
from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.extras import with_former_extras
from envbuild.lock.components.families import with_one_version
from envbuild.lock.components.git_sources import (
    GitSourceReader,
    forced_sources,
    marked,
    own_indexes,
    with_upstreams_phases,
)
from envbuild.lock.components.models import Chosen, Exemption, GitSources, Lead, Preference
from envbuild.lock.components.preferences import upstream_preferences
from envbuild.lock.components.releases import Releases, refuse_missing_pins, release_has_folder
from envbuild.lock.components.select import (
    choose,
    choose_anchor,
    deviated,
    lead,
    own_choice,
    upstream_overrides,
)
from envbuild.lock.components.upstream import LLM_COLLECTION, companions, has_folder
from envbuild.lock.components.version_limits import hold_to_cuda, hold_to_declared
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.pins import Ref, VersionRef, parse_pins, unknown_pin
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.uv.named_index import LookUpRules, OwnIndexes, named_indexes

NEMO_TOOLKIT = "nemo-toolkit"
STACKS_FILE = "the stack's file"


@dataclass(frozen=True, kw_only=True)
class Leading:
    """A stack as it holds for the anchor that was chosen, and the components whose upstreams decide the companions."""

    stack: Stack
    components: tuple[Chosen, ...]
    because: str


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


def leading_components(
    stack: Stack,
    anchor: Chosen | None,
    pins: Mapping[str, Ref],
    as_of: Bound,
    releases: Releases,
) -> Leading:
    """Decide whether the stack's takeover holds, and which components lead.

    Args:
        releases: what is known of a lead that is a release.

    Raises:
        UsageError: a component that only the takeover brings is pinned, and it does not hold.
    """
    if anchor is None:
        return Leading(stack=stack, components=(), because=STACKS_FILE)
    repositories = releases.context.repositories
    takeover = stack.takeover
    if takeover is None:
        return Leading(stack=stack, components=(anchor,), because=STACKS_FILE)
    if anchor.commit is not None:
        has_code = has_folder(repositories.at(anchor.git), anchor.commit, takeover.without)
    else:
        has_code = releases.has_folder(anchor, takeover.without)
    if has_code:
        # Other names may be packages that a component takes from git: looked for once its commit is known.
        if unused := [name for name in pins if name in takeover.components and name not in stack.components]:
            raise UsageError(
                f"{', '.join(unused)} is pinned, and is not in the stack with {anchor.at()}",
                why=f"The stack has it only where the anchor has no {takeover.without}, and this one has.",
                fix="Leave the pin out, or choose another anchor.",
            )
        return Leading(stack=stack, components=(anchor,), because=f"{anchor.at()} has {takeover.without}")
    taken = stack.taken_over()
    spec = taken.components[takeover.lead]
    choice = own_choice(takeover.lead, spec, pins.get(takeover.lead), repositories, as_of)
    because = f"{anchor.at()} has no {takeover.without}: {takeover.reason}"
    return Leading(stack=taken, components=(choice, anchor), because=because)


def commit_without_llm(chosen: Mapping[str, Chosen], driver: Driver, repositories: Repositories) -> str:
    """What driver ``nemo`` misses in a nemo-toolkit from git; empty: nothing, or it is a release."""
    component = chosen.get(NEMO_TOOLKIT)
    if driver is not Driver.NEMO or component is None or component.commit is None:
        return ""
    if has_folder(repositories.at(component.git), component.commit, LLM_COLLECTION):
        return ""
    return f"{component.at()} has no {LLM_COLLECTION}"


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
    # commit_without_llm has looked at the tree of one from git.
    if "git" in package["source"] or release_has_folder(package, LLM_COLLECTION, context):
        return ""
    return f"{NEMO_TOOLKIT} {package['version']} has no {LLM_COLLECTION}"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The stack as it holds for its anchor, every component of it, the as-of moment, and what is exempt from it.

    Attributes:
        own: the packages that are taken from an index of their own.
        preferences: versions that upstream tested with, by package.
    """

    effective: EffectiveStack
    chosen: Mapping[str, Chosen]
    as_of: AsOf
    git_sources: GitSources
    own: OwnIndexes
    exempt: Mapping[str, Exemption]
    preferences: Mapping[str, Preference]


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """What is decided before anything but the components that lead is looked up on an index.

    Attributes:
        dates: moments of their own that packages have.
        own: the packages that are taken from an index of their own.
    """

    effective: EffectiveStack
    chosen: Mapping[str, Chosen]
    as_of: AsOf
    dates: Mapping[str, str]
    git_sources: GitSources
    own: OwnIndexes

    def looked_up(self, pins: Mapping[str, Ref]) -> set[str]:
        """The packages that an index may have been asked about."""
        leads = {lead.chosen.name for lead in self.effective.leads if not lead.chosen.is_direct}
        return leads | {name for name, pin in pins.items() if isinstance(pin, VersionRef)}


def decide_components(inputs: LockInputs, context: LockContext) -> Decided:
    """Decide every component and the as-of moment.

    Raises:
        ConfigurationError: a ref does not exist, or cannot be used.
        UsageError: a pin or ``--as-of`` is wrong.
        NetworkError: a repository or an index cannot be reached.
    """
    base = inputs.selection.base
    pins = parse_pins(inputs.selection.stack_name, inputs.selection.stack, inputs.request.pins)
    begun = _begin(inputs, pins, context)
    chosen, exempt = hold_to_cuda(begun.chosen, inputs, begun.as_of, begun.own, context)
    dates = {**begun.dates, **{name: exemption.until for name, exemption in exempt.items()}}
    dates |= {deviation.package: deviation.until for deviation in inputs.deviations if deviation.until}
    rules = LookUpRules(own=begun.own, settings=begun.as_of.settings(dates))
    # Once: what a search tries afterwards has the same pins.
    if not inputs.deviations:
        refuse_missing_pins(chosen, base, inputs.torch_build, rules, context)
    declarations = Declarations(base, rules, context)
    # Before the companions are held: megatron-core 0.15 declares another Transformer Engine than 0.16 does.
    moved = deviated(chosen, inputs.deviations)
    held = hold_to_declared(begun.effective.stack, moved, declarations)
    # What deviates is not held itself (test_companions_are_held_to_the_release_that_deviates).
    held |= {name: item for name, item in moved.items() if item is not chosen[name]}
    chosen = with_former_extras(held, declarations)
    preferences = upstream_preferences(begun.effective.leads, base, context)
    chosen = with_one_version(chosen, base, rules, preferences, context)
    return Decided(
        effective=begun.effective,
        chosen=marked(chosen, begun.git_sources),
        as_of=begun.as_of,
        git_sources=begun.git_sources,
        own=begun.own,
        exempt=exempt,
        preferences=preferences,
    )


def _begin(inputs: LockInputs, pins: Mapping[str, Ref], context: LockContext) -> _Begun:
    selection, repositories = inputs.selection, context.repositories
    asked = as_of.NOW if inputs.no_as_of else inputs.request.as_of
    bound = branch_bound(selection, asked, pins, repositories)
    anchor = choose_anchor(selection.stack, pins, repositories, bound)

    def begin(own: OwnIndexes) -> _Begun:
        moment = as_of_moment(selection, asked, pins, anchor, own, context)
        moment = as_of.not_held(context.clock) if inputs.no_as_of else replace(moment, undated=inputs.undated)
        # Known only now: the companions' branches are as of the moment that follows from the anchor.
        until = moment.moment if bound is None and moment.asked != as_of.NOW else bound
        return _begin_as_of(inputs, pins, anchor, moment, until, own, context)

    first = _first_indexes(inputs, pins, anchor, bound, context)
    begun = begin(first)
    # Trees that only a release leads to, or that are others as of its date: what they say of it holds from the start.
    if not begun.own.agrees_with(first, begun.looked_up(pins)):
        first, begun = begun.own, begin(begun.own)
    if not begun.own.agrees_with(first, names := begun.looked_up(pins)):
        raise ConfigurationError(
            f"it is not clear from which index {', '.join(sorted(names))} come",
            why="The components that name an index for them are other commits as of the date that this index gives.",
            fix="Name the date: --as-of YYYY-MM-DD",
        )
    return begun


def _first_indexes(
    inputs: LockInputs, pins: Mapping[str, Ref], anchor: Chosen | None, bound: Bound, context: LockContext
) -> OwnIndexes:
    """Which packages are taken from an index of their own, as far as trees say so that no release leads to."""
    if not any(isinstance(pin, VersionRef) for pin in pins.values()) and (anchor is None or anchor.is_direct):
        return OwnIndexes()  # nothing is looked up before the trees are known
    stack, repositories = inputs.selection.stack, context.repositories
    leads = []
    if anchor is not None and anchor.commit is not None:
        found = companions(repositories.at(anchor.git), anchor.commit, inputs.selection.base)
        leads = [Lead(chosen=anchor, companions=found)]
    chosen = choose(stack, pins, leads, repositories, bound, inputs.selection.base)
    quiet = replace(context, reporter=SilentReporter())
    sources = _source_reader(inputs, stack, leads, chosen, pins, bound, quiet).take(chosen)
    return own_indexes({}, sources, named_indexes(context.site.indexes))


def _begin_as_of(
    inputs: LockInputs,
    pins: Mapping[str, Ref],
    anchor: Chosen | None,
    moment: AsOf,
    bound: Bound,
    own: OwnIndexes,
    context: LockContext,
) -> _Begun:
    selection, base = inputs.selection, inputs.selection.base
    dates = own_dates(selection.stack.every_component())
    releases = Releases(
        catalog=selection.catalog,
        base=base,
        rules=LookUpRules(own=own, settings=moment.settings(dates)),
        undecided=frozenset(selection.stack.undecided() - set(pins)),
        context=context,
    )
    led = leading_components(selection.stack, anchor, pins, bound, releases)
    leads = tuple(lead(component, releases) for component in led.components)
    effective = EffectiveStack(stack=led.stack, leads=leads, because=led.because)
    chosen = choose(effective.stack, pins, effective.leads, context.repositories, bound, base)
    chosen = with_upstreams_phases(chosen, inputs.compiled, effective.leads, context.repositories)
    taking = deviated(chosen, inputs.deviations)
    # Of a tree the extras are known without an index.
    trees = {name: item for name, item in taking.items() if item.commit is not None}
    taking |= with_former_extras(trees, Declarations(base, LookUpRules(own=own), context))
    sources = _git_sources(inputs, effective, taking, pins, bound, context)
    return _Begun(
        effective=effective,
        chosen=chosen,
        as_of=moment,
        dates=dates,
        git_sources=sources,
        own=own_indexes({}, sources, named_indexes(context.site.indexes)),
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
    stack = inputs.selection.stack
    sources = _source_reader(inputs, stack, effective.leads, chosen, pins, bound, context).take(chosen)
    if unknown := _others(pins, stack).keys() - sources.in_force.keys():
        known = [*stack.every_component(), *sources.in_force]
        raise unknown_pin(inputs.selection.stack_name, min(unknown), known)
    return sources


def _others(pins: Mapping[str, Ref], stack: Stack) -> dict[str, Ref]:
    """The pins of packages that are no components."""
    return {name: pin for name, pin in pins.items() if name not in stack.every_component()}


def _source_reader(
    inputs: LockInputs,
    stack: Stack,
    leads: Sequence[Lead],
    chosen: Mapping[str, Chosen],
    pins: Mapping[str, Ref],
    bound: Bound,
    context: LockContext,
) -> GitSourceReader:
    base = inputs.selection.base
    forced = upstream_overrides(leads, chosen, context.repositories)
    return GitSourceReader(
        base=base,
        repositories=context.repositories,
        reporter=context.reporter,
        ruled={*stack.overrides_of_all(), *forced, *base.provides} | replaced(inputs.deviations),
        forced=forced_sources(leads, base, context.repositories),
        required={*stack.requirements, *(item.package for item in inputs.deviations if item.added)},
        pins=_others(pins, stack),
        as_of=bound,
        indexes=context.site.indexes,
    )
