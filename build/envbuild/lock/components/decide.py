"""The step `components`: every component and the training code, the as-of moment, and what is exempt from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.catalog.stack import Driver, Stack
from envbuild.core.errors import UsageError
from envbuild.lock.components.as_of_moment import as_of_moment, branch_bound, own_dates
from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.extras import with_former_extras
from envbuild.lock.components.families import with_one_version
from envbuild.lock.components.git_sources import GitSourceReader, forced_sources, marked, with_upstreams_phases
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
from envbuild.lock.components.upstream import LLM_COLLECTION, has_folder
from envbuild.lock.components.version_limits import hold_to_cuda, hold_to_declared
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.pins import Ref, parse_pins, unknown_pin
from envbuild.lock.inputs.request import LockInputs

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
    item = chosen.get(NEMO_TOOLKIT)
    if driver is not Driver.NEMO or item is None or item.commit is None:
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
    # commit_without_llm has looked at the tree of one from git.
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
    asked = as_of.NOW if inputs.no_as_of else request.as_of
    bound = branch_bound(selection, asked, pins, context.repositories)
    anchor = choose_anchor(stack, pins, context.repositories, bound)
    moment = as_of_moment(selection, asked, pins, anchor, context)
    moment = as_of.not_held(context.clock) if inputs.no_as_of else moment
    # Known only now: the companions' branches are as of the moment that follows from the anchor.
    if bound is None and moment.asked != as_of.NOW:
        bound = moment.moment
    dates = own_dates(stack.every_component())
    releases = Releases(
        catalog=selection.catalog,
        base=base,
        settings=moment.settings(dates),
        undecided=frozenset(stack.undecided() - set(pins)),
        context=context,
    )
    led = leading_components(stack, anchor, pins, bound, releases)
    leads = tuple(lead(item, releases) for item in led.components)
    effective = EffectiveStack(stack=led.stack, leads=leads, because=led.because)
    chosen = choose(effective.stack, pins, effective.leads, context.repositories, bound, base)
    chosen = with_upstreams_phases(chosen, inputs.compiled, effective.leads, context.repositories)
    chosen, exempt = hold_to_cuda(chosen, inputs, moment, context)
    dates |= {name: item.until for name, item in exempt.items()}
    dates |= {item.package: item.until for item in inputs.deviations if item.until}
    settings = moment.settings(dates)
    # Once: what a search tries afterwards has the same pins.
    if not inputs.deviations:
        refuse_missing_pins(chosen, base, inputs.torch_build, settings, context)
    declarations = Declarations(base, settings, context)
    # Before the companions are held: megatron-core 0.15 declares another Transformer Engine than 0.16 does.
    moved = deviated(chosen, inputs.deviations)
    held = hold_to_declared(effective.stack, moved, declarations)
    # What deviates is not held itself (test_companions_are_held_to_the_release_that_deviates).
    held |= {name: item for name, item in moved.items() if item is not chosen[name]}
    chosen = with_former_extras(held, declarations)
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
        ruled={*stack.overrides_of_all(), *forced, *base.provides} | replaced(inputs.deviations),
        forced=forced_sources(effective.leads, base, context.repositories),
        pins=others,
        as_of=bound,
        indexes=context.site.indexes,
    ).take(chosen)
    if unknown := others.keys() - sources.in_force.keys():
        known = [*stack.every_component(), *sources.in_force]
        raise unknown_pin(inputs.selection.stack_name, min(unknown), known)
    return sources
