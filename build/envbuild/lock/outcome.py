"""What an attempt at a lock ends with: a lock, or a failure with all that its steps found out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.core.errors import EnvbuildError
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.verification import VerifiedLock

# Slow to import, and mostly there is nothing to do.
if TYPE_CHECKING:
    from envbuild.lock.components.decide import Decided
    from envbuild.lock.project.plan import LockPlan
    from envbuild.lock.resolve.resolve import ResolvedPlan


@dataclass(frozen=True)
class NewLock:
    """A lock that passed every check, in a folder that goes at the end.

    Attributes:
        verified: what its verification showed; None: it was not verified.
    """

    folder: Path
    verified: VerifiedLock | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An attempt that gave no lock, and how far it came.

    Attributes:
        inputs: what it took.
        decided: its components; None where their step failed.
        plan: what uv was asked; None before.
        resolved: what uv found; None before. It may have failed after that.
        to_compile: packages that have no wheel and belong into phase compile; the error says no more than this.
        undated: where the error is that an index states no upload times: all packages without, as far as is known.
        all_undated: no package has any.
        settled: the findings are about packages that are decided: no other release and no other base cures them.
    """

    inputs: LockInputs
    error: EnvbuildError
    decided: Decided | None = None
    plan: LockPlan | None = None
    resolved: ResolvedPlan | None = None
    to_compile: frozenset[str] = frozenset()
    undated: frozenset[str] = frozenset()
    all_undated: bool = False
    settled: bool = False
