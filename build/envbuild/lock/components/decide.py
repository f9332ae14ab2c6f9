"""The step `components`: every component and the training code, the as-of moment, and what is exempt from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from envbuild.catalog.stack import Driver, Stack
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.as_of_moment import as_of_moment, branch_bound, own_dates
from envbuild.lock.components.declarations import Declarations
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
from envbuild.lock.components.releases import find_release, refuse_missing_pins, release_has_folder, release_lead
from envbuild.lock.components.select import Chooser, deviated, tree_lead, upstream_overrides
from envbuild.lock.components.tree import tree_of
from envbuild.lock.components.upstream import LLM_COLLECTION
from envbuild.lock.components.version_limits import hold_to_cuda, hold_to_declared
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf, Bound
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.pins import Ref, VersionRef, parse_pins, unknown_pin
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.uv.named_index import OwnIndexes, named_indexes
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv_lock import Packages

NEMO_TOOLKIT = "nemo-toolkit"
STACKS_FILE = "the stack's file"


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


def commit_without_llm(chosen: Mapping[str, Chosen], driver: Driver, repositories: Repositories) -> str:
    """What driver ``nemo`` misses in a nemo-toolkit from git; empty: nothing, or it is a release."""
    if driver is not Driver.NEMO or NEMO_TOOLKIT not in chosen:
        return ""
    tree = tree_of(chosen[NEMO_TOOLKIT], repositories)
    return "" if tree is None or tree.has_folder(LLM_COLLECTION) else f"{tree.component.title} has no {LLM_COLLECTION}"


def release_without_llm(packages: Packages, driver: Driver, context: LockContext) -> str:
    """What driver ``nemo`` misses in the release of nemo-toolkit that was locked; empty: nothing, or it is from git."""
    if driver is not Driver.NEMO:
        return ""
    package = packages.get(NEMO_TOOLKIT)
    if package is None:
        return f"there is no {NEMO_TOOLKIT}"
    # commit_without_llm has looked at the tree of one from git.
    if "git" in package.source or release_has_folder(package, LLM_COLLECTION, context):
        return ""
    return f"{package.title} has no {LLM_COLLECTION}"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The stack as it holds for its anchor, every component of it, the as-of moment, and what is exempt from it.

    Attributes:
        dates: moments of their own that packages have.
        own: the packages that are taken from an index of their own.
        preferences: versions that upstream tested with, by package.
    """

    effective: EffectiveStack
    chosen: Mapping[str, Chosen]
    as_of: AsOf
    git_sources: GitSources
    own: OwnIndexes
    dates: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, Exemption] = field(default_factory=dict)
    preferences: Mapping[str, Preference] = field(default_factory=dict)


def decide_components(inputs: LockInputs, context: LockContext) -> Decided:
    """Decide every component and the as-of moment.

    Raises:
        ConfigurationError: a ref does not exist, or cannot be used.
        UsageError: a pin or ``--as-of`` is wrong.
        NetworkError: a repository or an index cannot be reached.
    """
    pins = parse_pins(inputs.selection.stack_name, inputs.selection.stack, inputs.request.pins)
    begun = _Beginning(inputs, pins, context).decided()
    index = PackageIndex(base=inputs.selection.base, context=context, own=begun.own)
    chosen, exempt = hold_to_cuda(begun.chosen, inputs, begun.as_of, index)
    dates = {**begun.dates, **{name: exemption.until for name, exemption in exempt.items()}}
    dates |= {deviation.package: deviation.until for deviation in inputs.deviations if deviation.until}
    index = replace(index, settings=begun.as_of.settings(dates))
    # Once: what a search tries afterwards has the same pins.
    if not inputs.deviations:
        refuse_missing_pins(chosen, inputs.torch_build, index)
    declarations = Declarations(index)
    # Before the companions are held: megatron-core 0.15 declares another Transformer Engine than 0.16 does.
    moved = deviated(chosen, inputs.deviations)
    held = hold_to_declared(begun.effective.stack, moved, declarations)
    # What deviates is not held itself (test_companions_are_held_to_the_release_that_deviates).
    held |= {name: component for name, component in moved.items() if component is not chosen[name]}
    preferences = upstream_preferences(begun.effective.leads, index.base, context)
    chosen = with_one_version(declarations.with_former_extras(held), index, preferences)
    return replace(begun, chosen=marked(chosen, begun.git_sources), dates=dates, exempt=exempt, preferences=preferences)


class _Beginning:
    """What is decided before anything but the components that lead is looked up on an index."""

    def __init__(self, inputs: LockInputs, pins: Mapping[str, Ref], context: LockContext) -> None:
        self._inputs, self._pins, self._context = inputs, pins, context
        self._stack, self._base = inputs.selection.stack, inputs.selection.base
        self._asked = as_of.NOW if inputs.no_as_of else inputs.request.as_of
        self._bound = branch_bound(inputs.selection, self._asked, pins, context.repositories)
        self._anchor = self._chooser(self._bound).anchor(self._stack)

    def decided(self) -> Decided:
        """The components, as far as trees, and the releases that lead, say what they are."""
        first = self._first_indexes()
        decided = self._with_indexes(first)
        # Trees that only a release leads to, or that are others as of its date: what they say holds from the start.
        if not decided.own.agrees_with(first, self._looked_up(decided)):
            first, decided = decided.own, self._with_indexes(decided.own)
        if not decided.own.agrees_with(first, names := self._looked_up(decided)):
            raise ConfigurationError(
                f"it is not clear from which index {', '.join(sorted(names))} come",
                why="The components that name an index for them are other commits as of the date that this index "
                "gives.",
                fix="Name the date: --as-of YYYY-MM-DD",
            )
        return decided

    def _chooser(self, bound: Bound) -> Chooser:
        return Chooser(pins=self._pins, as_of=bound, base=self._base, repositories=self._context.repositories)

    def _looked_up(self, decided: Decided) -> set[str]:
        """The packages that an index may have been asked about."""
        leads = {lead.chosen.name for lead in decided.effective.leads if not lead.chosen.is_direct}
        return leads | {name for name, pin in self._pins.items() if isinstance(pin, VersionRef)}

    def _first_indexes(self) -> OwnIndexes:
        """Which packages are taken from an index of their own, as far as trees say so that no release leads to."""
        anchor = self._anchor
        if not any(isinstance(pin, VersionRef) for pin in self._pins.values()) and (anchor is None or anchor.is_direct):
            return OwnIndexes()  # nothing is looked up before the trees are known
        tree = tree_of(anchor, self._context.repositories) if anchor is not None else None
        leads = [tree_lead(tree, self._base)] if tree is not None else []
        chosen = self._chooser(self._bound).components(self._stack, leads)
        # What it has to note is noted when everything is known.
        reader = replace(self._reader(leads, chosen, self._bound), reporter=SilentReporter())
        return self._own(reader.sources(chosen))

    def _with_indexes(self, own: OwnIndexes) -> Decided:
        inputs = self._inputs
        index = PackageIndex(base=self._base, context=self._context, own=own)
        moment = as_of_moment(inputs.selection, self._asked, self._pins, self._anchor, index)
        moment = as_of.not_held(self._context.clock) if inputs.no_as_of else replace(moment, undated=inputs.undated)
        # Known only now: the companions' branches are as of the moment that follows from the anchor.
        bound = moment.moment if self._bound is None and moment.asked != as_of.NOW else self._bound
        dates = own_dates(self._stack.every_component())
        chooser, repositories = self._chooser(bound), self._context.repositories
        effective = self._effective(chooser, replace(index, settings=moment.settings(dates)))
        chosen = chooser.components(effective.stack, effective.leads)
        chosen = with_upstreams_phases(chosen, inputs.compiled, effective.leads, repositories)
        taking = deviated(chosen, inputs.deviations)
        # Of a tree the extras are known without an index.
        trees = {name: component for name, component in taking.items() if component.commit is not None}
        taking |= Declarations(index).with_former_extras(trees)
        sources = self._reader(effective.leads, taking, bound).sources(taking)
        if unknown := self._other_pins().keys() - sources.in_force.keys():
            known = [*self._stack.every_component(), *sources.in_force]
            raise unknown_pin(inputs.selection.stack_name, min(unknown), known)
        return Decided(
            effective=effective,
            chosen=chosen,
            as_of=moment,
            git_sources=sources,
            own=self._own(sources),
            dates=dates,
        )

    def _effective(self, chooser: Chooser, index: PackageIndex) -> EffectiveStack:
        """The stack with its takeover, where that holds, and the components that lead.

        Args:
            index: asked about a lead that is a release.

        Raises:
            UsageError: a component that only the takeover brings is pinned, and it does not hold.
        """
        stack, anchor, takeover = self._stack, self._anchor, self._stack.takeover
        if anchor is None:
            return EffectiveStack(stack=stack, leads=(), because=STACKS_FILE)
        if takeover is None:
            return EffectiveStack(stack=stack, leads=(self._lead(anchor, index),), because=STACKS_FILE)
        if self._anchor_has(anchor, takeover.without, index):
            # Other names may be packages that a component takes from git: looked for once its commit is known.
            if unused := [name for name in self._pins if name in takeover.components and name not in stack.components]:
                raise UsageError(
                    f"{', '.join(unused)} is pinned, and is not in the stack with {anchor.title}",
                    why=f"The stack has it only where the anchor has no {takeover.without}, and this one has.",
                    fix="Leave the pin out, or choose another anchor.",
                )
            because = f"{anchor.title} has {takeover.without}"
            return EffectiveStack(stack=stack, leads=(self._lead(anchor, index),), because=because)
        taken_over = stack.taken_over()
        first = chooser.own_choice(takeover.lead, taken_over.components[takeover.lead])
        leads = (self._lead(first, index), self._lead(anchor, index))
        because = f"{anchor.title} has no {takeover.without}: {takeover.reason}"
        return EffectiveStack(stack=taken_over, leads=leads, because=because)

    def _anchor_has(self, anchor: Chosen, folder: str, index: PackageIndex) -> bool:
        """Whether the anchor's tree, or its release, has files in a folder."""
        if (tree := tree_of(anchor, self._context.repositories)) is not None:
            return tree.has_folder(folder)
        with self._context.reporter.step(f"look at {anchor.name} {anchor.asked}"):
            return release_has_folder(find_release(anchor, index), folder, self._context)

    def _lead(self, chosen: Chosen, index: PackageIndex) -> Lead:
        """What belongs to a component: upstream's own pins at its commit, or what a table says of its release."""
        if (tree := tree_of(chosen, self._context.repositories)) is not None:
            with self._context.reporter.step(f"read upstream's pins at {chosen.title}"):
                return tree_lead(tree, self._base)
        undecided = self._stack.undecided() - self._pins.keys()
        return release_lead(chosen, self._inputs.selection.catalog, undecided, index)

    def _reader(self, leads: Sequence[Lead], chosen: Mapping[str, Chosen], bound: Bound) -> GitSourceReader:
        """Finds what the components from git take from elsewhere themselves."""
        repositories = self._context.repositories
        forced = upstream_overrides(leads, chosen, repositories)
        added = (deviation.package for deviation in self._inputs.deviations if deviation.added)
        return GitSourceReader(
            base=self._base,
            repositories=repositories,
            reporter=self._context.reporter,
            ruled={*self._stack.overrides_of_all(), *forced, *self._base.provides} | replaced(self._inputs.deviations),
            forced=forced_sources(leads, self._base, repositories),
            required={*self._stack.requirements, *added},
            pins=self._other_pins(),
            as_of=bound,
            indexes=self._context.site.indexes,
        )

    def _other_pins(self) -> dict[str, Ref]:
        """The pins of packages that are no components."""
        return {name: pin for name, pin in self._pins.items() if name not in self._stack.every_component()}

    def _own(self, sources: GitSources) -> OwnIndexes:
        return own_indexes({}, sources, named_indexes(self._context.site.indexes))
