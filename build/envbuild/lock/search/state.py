"""What an attempt deviates in, and what its failure is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from envbuild.core.errors import EnvbuildError
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.models import Deviation
from envbuild.lock.search.clashes import Clash

# Deviations that only make sense together: one version for all packages of a family.
Move: TypeAlias = tuple[Deviation, ...]


def moved(deviations: Iterable[Deviation], move: Move) -> tuple[Deviation, ...]:
    """The deviations with those of a move, each in the place of an earlier one of its package."""
    taken = {(earlier.package, earlier.declared_by): earlier for earlier in deviations}
    for deviation in move:
        key = (deviation.package, deviation.declared_by)
        # What upstream says, and not what was tried before.
        taken[key] = deviation.model_copy(update={"instead_of": taken[key].instead_of}) if key in taken else deviation
    return tuple(taken.values())


def key_of(deviations: Iterable[Deviation]) -> tuple[tuple[str, ...], ...]:
    """What two attempts are the same by."""
    return tuple(sorted((taken.package, taken.specifier, taken.until, taken.declared_by) for taken in deviations))


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
            return others[0].id not in {finding.id for finding in mine}
        # uv names one contradiction; that of a move may be another one about the same packages.
        return bool(self.packages) and not {*self.packages} & {*other.packages}

    @property
    def _step(self) -> int:
        """How far the attempt came: to the resolution, to the checks, to the installation or the imports."""
        imported = not self.findings or {"import", "install"} & {finding.code for finding in self.findings}
        return self.resolved + (self.resolved and bool(imported))

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        return self.error.findings if isinstance(self.error, LockRefusedError) else ()
