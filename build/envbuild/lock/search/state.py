"""One state of the search: what deviates from upstream's pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from envbuild.core.errors import EnvbuildError
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.deviation import Deviation
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.search.clashes import Clash

# Deviations that only make sense together: one version for all packages of a family.
Move: TypeAlias = tuple[Deviation, ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """What one attempt takes.

    Attributes:
        deviations: what is taken in the place of upstream's pins, by package and by whose declaration is replaced.
    """

    deviations: Mapping[tuple[str, str], Deviation] = field(default_factory=dict)

    def with_move(self, move: Move) -> State:
        """The state with these deviations, each in the place of an earlier one of its package."""
        moved = dict(self.deviations)
        for item in move:
            key = (item.package, item.declared_by)
            # What upstream says, and not what was tried before.
            moved[key] = replace(item, instead_of=moved[key].instead_of) if key in moved else item
        return replace(self, deviations=moved)

    def of(self, inputs: LockInputs) -> LockInputs:
        """The inputs of an attempt."""
        return replace(inputs, deviations=tuple(self.deviations.values()))

    @property
    def key(self) -> tuple[object, ...]:
        """What two states are the same by."""
        deviations = self.deviations.values()
        return tuple(sorted((item.package, item.specifier, item.until, item.declared_by) for item in deviations))


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What a failed attempt is about.

    Attributes:
        packages: canonical names, the likeliest first.
        missing: modules that something imports and no package of the lock brings.
        clashes: declarations that exclude each other.
        unbuilt: a package that something asks for, and that uv cannot build; empty: none.
        signature: the same for two failures with one cause.
        resolved: the attempt resolved, and failed after that.
        of_syntax: the base's Python does not understand a module: no other release of what it imports cures that.
        of_source: a git repository does not give a commit: no other release of an unrelated package cures that.
        settled: findings about packages that are decided: no other release and no other base cures them.
    """

    error: EnvbuildError
    packages: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    clashes: tuple[Clash, ...] = ()
    unbuilt: str = ""
    signature: str = ""
    resolved: bool = False
    of_syntax: bool = False
    of_source: bool = False
    settled: tuple[CheckFinding, ...] = ()

    def is_beyond(self, other: Blame) -> bool:
        """Whether this failure is of an attempt that no longer has another one: the other was solved on the way."""
        if self.of_source and not (other.resolved or other.of_source):
            return True
        if self._step != other._step:
            return self._step > other._step
        mine, others = self.findings, other.findings
        if mine and others:
            return others[0].id not in {item.id for item in mine}
        # uv names one contradiction; that of a move may be another one about the same packages.
        return bool(self.packages) and not {*self.packages} & {*other.packages}

    @property
    def _step(self) -> int:
        """How far the attempt came: to the resolution, to the checks, to the installation or the imports."""
        imported = not self.findings or {"import", "install"} & {item.code for item in self.findings}
        return self.resolved + (self.resolved and bool(imported))

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        return self.error.findings if isinstance(self.error, LockRefusedError) else ()
