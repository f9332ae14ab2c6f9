"""Which cases of a matrix are run, and what trains them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from envbuild.catalog.catalog import Selection
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.model_spec import ModelSpec
from envbuild.catalog.stack import Driver, shipped_matrix
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import LeftOut, expand
from envbuild.core.errors import CertificationCannotRunError, ConfigurationError, UsageError
from envbuild.lock.models import Lock


@dataclass(frozen=True, kw_only=True)
class WantedCases:
    """Which cases of a matrix a user wants.

    Attributes:
        only: case IDs; empty for all.
        max_gpus: no case of more GPUs, or of more processes on a CPU.
        nodes: no case over more nodes. With all others a matrix is whole: one node cannot run them.
    """

    only: tuple[str, ...] = ()
    max_gpus: int | None = None
    nodes: int = 1

    def __bool__(self) -> bool:
        return bool(self.only) or self.max_gpus is not None


ALL = WantedCases()


def chosen_cases(
    matrix: Matrix,
    matrix_name: str,
    selection: Selection,
    wanted: WantedCases = ALL,
    packages: Collection[str] = (),
) -> tuple[Case, ...]:
    """The cases to run: all of the matrix, or those wanted and the baselines they need.

    Args:
        packages: the names of the lock's packages.

    Raises:
        ConfigurationError: the matrix has baselines alone.
        UsageError: a case is wanted that the matrix does not have, or nothing that is compared.
    """
    expanded = expand(matrix, matrix_name, Capabilities.for_selection(selection, packages))
    cases = tuple(case for case in expanded if case.most_nodes <= wanted.nodes)
    if all(case.is_baseline for case in cases):
        raise ConfigurationError(
            f"matrix {matrix_name} compares nothing",
            why="All its cases are baselines, and a baseline agrees with itself.",
            fix="Add a case with another layout to it.",
        )
    named = _named(expanded, matrix_name, wanted) if wanted.only else cases
    return named if wanted.max_gpus is None else _fitting(named, wanted.max_gpus)


def over_more_nodes(cases: Sequence[Case], nodes: int) -> tuple[LeftOut, ...]:
    """The cases that a run over so many nodes leaves out."""
    return tuple(
        LeftOut(id=case.id, why=f"it is over {case.most_nodes} nodes (--nodes {case.most_nodes})")
        for case in cases
        if case.most_nodes > nodes
    )


def _named(cases: tuple[Case, ...], matrix_name: str, wanted: WantedCases) -> tuple[Case, ...]:
    """The cases that are named, and the baselines that they need."""
    only = wanted.only
    known = {case.id: case for case in cases}
    if unknown := [name for name in only if name not in known]:
        raise UsageError(
            f"matrix {matrix_name} has no case {unknown[0]!r}",
            why=f"Its cases: {', '.join(known)}.",
            fix="Choose among these (`envbuild certify --print-cases`).",
        )
    if left_out := over_more_nodes([known[name] for name in only], wanted.nodes):
        raise UsageError(
            f"{left_out[0].id} is left out",
            why=f"The run has {wanted.nodes} node{'s' if wanted.nodes > 1 else ''}, and {left_out[0].why}.",
            fix="Run on more nodes, or name another case.",
        )
    if all(known[name].is_baseline for name in only):
        raise UsageError(
            f"{only[0]} alone compares nothing",
            why="It is a baseline: the case that others are compared with. It runs with each of them by itself.",
            fix=f"Name another case: {', '.join(case.id for case in cases if not case.is_baseline)}.",
        )
    return with_baselines(cases, only)


def _fitting(cases: tuple[Case, ...], max_gpus: int) -> tuple[Case, ...]:
    """The cases of at most so many GPUs; a baseline of nothing is left out."""
    fitting = with_baselines(cases, [c.id for c in cases if not c.is_baseline and c.slots <= max_gpus])
    if not fitting:
        raise UsageError(
            f"nothing is compared on {max_gpus} GPU{'s' if max_gpus > 1 else ''}",
            why="All cases but baselines need more.",
            fix="Allow more: --max-gpus N (`envbuild certify --print-cases` prints how many each case needs).",
        )
    return fitting


def without_known_wrong(
    cases: tuple[Case, ...], left_out: Sequence[LeftOut], only: Collection[str]
) -> tuple[Case, ...]:
    """The cases but for those that the locked versions are known to train wrongly.

    Raises:
        CertificationCannotRunError: ``only`` names one of them, or no other is left that is compared with a baseline.
    """
    wrong = {case.id: case.why for case in left_out}
    kept = tuple(case for case in cases if case.id not in wrong)
    named = [name for name in only if name in wrong]
    if not named and not all(case.is_baseline for case in kept):
        return kept
    shown = named or list(wrong)
    raise CertificationCannotRunError(
        f"{shown[0]} is left out" if named else "no case is left to run",
        why="\n".join(f"{name}: {wrong[name]}" for name in shown),
        fix="Nothing was run. --run-known-wrong trains these cases and shows what they compute.",
        reason="known-wrong",
    )


def with_baselines(cases: tuple[Case, ...], ids: Collection[str]) -> tuple[Case, ...]:
    """The cases that are named, and the baselines that they need."""
    needed = {case.baseline_id for case in cases if case.id in ids}
    return tuple(case for case in cases if case.id in ids or case.id in needed)


def driver_of(selection: Selection, matrix_name: str, lock: Lock | None = None) -> Driver:
    """The driver of the cases: the lock's, or without a lock that of the stack's file.

    Raises:
        CertificationCannotRunError: the matrix has no cases for it.
    """
    stack = selection.stack
    possible, source = [stack.driver], f"The file of stack {selection.stack_name}"
    if lock is not None and lock.driver is not None:
        possible, source = [lock.driver], f"The lock of stack {lock.stack} on {lock.base.name}"
    # Which driver it is depends on the files of the commit, and no commit was looked up yet without a lock.
    elif lock is None and stack.takeover is not None:
        possible.append(stack.takeover.driver)
    fitting = [driver for driver in possible if _trains(driver, selection.catalog.matrix(matrix_name))]
    if not fitting:
        other = shipped_matrix(possible[0], selection.target.device)
        names = " or ".join(driver.value for driver in possible)
        raise CertificationCannotRunError(
            f"matrix {matrix_name} has no cases for driver {names}",
            why=f"{source} names the driver. Drivers nemo and bridge train their recipes, and driver mcore the models "
            "without one.",
            fix=f"Nothing was run. Choose another matrix: --matrix {other}.",
            reason="no-cases",
        )
    return fitting[0]


def _trains(driver: Driver, matrix: Matrix) -> bool:
    """Whether a driver trains every model of a matrix."""
    return {_driver_of(model) for model in matrix.models.values()} == {driver}


def _driver_of(model: ModelSpec) -> Driver:
    """The driver that trains a model."""
    if model.recipe is None:
        return Driver.MCORE
    return Driver.BRIDGE if model.is_of_bridge else Driver.NEMO
