"""One state of the search: what deviates from upstream's pins, and which older commits are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from envbuild.core.errors import EnvbuildError
from envbuild.lock.inputs.deviation import Deviation
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.search.clashes import Clash

# Deviations that only make sense together: one version for all packages of a family.
Move: TypeAlias = tuple[Deviation, ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """What one attempt takes.

    Attributes:
        deviations: what is taken in the place of upstream's pins, by package.
        commits: older commits of their branches, by component.
        behind: how far these are behind, and what blocks the tips, for people.
    """

    deviations: Mapping[str, Deviation] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)
    behind: tuple[str, ...] = ()

    def with_move(self, move: Move) -> State:
        """The state with these deviations, each in the place of an earlier one of its package."""
        return replace(self, deviations={**self.deviations, **{item.package: item for item in move}})

    def of(self, inputs: LockInputs) -> LockInputs:
        """The inputs of an attempt."""
        return replace(inputs, deviations=tuple(self.deviations.values()), commits=self.commits, behind=self.behind)

    @property
    def key(self) -> tuple[object, ...]:
        """What two states are the same by."""
        deviations = self.deviations.values()
        taken = sorted((item.package, item.specifier, item.until, item.declared_by) for item in deviations)
        return (*taken, *sorted(self.commits.items()))


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What a failed attempt is about.

    Attributes:
        packages: canonical names, the likeliest first.
        missing: modules that something imports and no package of the lock brings.
        clashes: declarations that exclude each other.
        signature: the same for two failures with one cause.
    """

    error: EnvbuildError
    packages: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    clashes: tuple[Clash, ...] = ()
    signature: str = ""
