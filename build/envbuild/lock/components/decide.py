"""The step `components`: every component decided, the as-of moment, and what is exempt from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from envbuild.lock.components import anchor_date
from envbuild.lock.components.companion_ranges import hold_to_declared
from envbuild.lock.components.cuda_releases import hold_to_cuda
from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.driver import EffectiveStack, effective_stack
from envbuild.lock.components.git_source import GitSources
from envbuild.lock.components.git_sources import GitSourceReader, marked
from envbuild.lock.components.models import Chosen, Exemption
from envbuild.lock.components.releases import Releases
from envbuild.lock.components.select import choose, choose_anchor, upstream_overrides
from envbuild.lock.context import LockContext
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.pins import parse_pins, unknown_pin
from envbuild.lock.inputs.refs import Ref
from envbuild.lock.inputs.request import LockInputs


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The stack as it holds for its anchor, every component of it, the as-of moment, and what is exempt from it."""

    effective: EffectiveStack
    chosen: Mapping[str, Chosen]
    as_of: AsOf
    git_sources: GitSources
    exempt: Mapping[str, Exemption]


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
    bound = anchor_date.bound(selection, request.as_of, pins, context.repositories)
    anchor = choose_anchor(stack, pins, context.repositories, bound)
    moment = anchor_date.as_of(selection, request.as_of, pins, anchor, context)
    if bound is None and moment.asked != as_of.NOW:
        bound = moment.moment
    dates = anchor_date.own_dates(stack)
    releases = Releases(
        catalog=selection.catalog,
        base=base,
        settings={"exclude-newer": moment.text(), "exclude-newer-package": dates},
        undecided=frozenset(stack.undecided() - set(pins)),
        context=context,
    )
    effective = effective_stack(stack, anchor, pins, bound, releases)
    chosen = choose(effective.stack, pins, effective.leads, context.repositories, bound, base)
    held = hold_to_cuda(chosen, inputs, moment, context)
    dates |= {name: item.until for name, item in held.exempt.items()}
    settings = {"exclude-newer": moment.text(), "exclude-newer-package": dates}
    chosen = hold_to_declared(effective.stack, held.chosen, Declarations(base, settings, context))
    sources = _git_sources(inputs, effective, chosen, pins, bound, context)
    return Decided(
        effective=effective,
        chosen=marked(chosen, sources),
        as_of=moment,
        git_sources=sources,
        exempt=dict(held.exempt),
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
        ruled={canonicalize_name(name) for name in (*stack.overrides_of_all(), *forced, *base.provides)},
        pins=others,
        as_of=bound,
    ).take(chosen)
    if unknown := others.keys() - sources.in_force.keys():
        known = [*stack.every_component(), *sources.in_force]
        raise unknown_pin(inputs.selection.stack_name, min(unknown), known)
    return sources
