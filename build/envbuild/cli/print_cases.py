"""``envbuild certify --print-cases``: the cases of a matrix for a target, and which of them are left out and why."""

from __future__ import annotations

from envbuild.catalog.catalog import Selection
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.coverage import Pair, coverage, lines_of
from envbuild.certify.cases.expansion import expansion
from envbuild.certify.cases.known_wrong import affected_cases, left_out
from envbuild.certify.cases.selection import (
    WantedCases,
    chosen_cases,
    driver_of,
    over_more_nodes,
    without_known_wrong,
)
from envbuild.cli.common import Session
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError
from envbuild.lock.known_wrong import known_wrong_in
from envbuild.lock.lockdir import find_lock
from envbuild.lock.lockfile import LockDirectory
from envbuild_smoke.plan.axes import Part


def print_cases(
    session: Session,
    selection: Selection,
    matrix_name: str | None,
    wanted: WantedCases,
    lock_name: str | None,
    *,
    run_known_wrong: bool,
) -> None:
    """Print the cases that would run, or those named with their baselines.

    Raises:
        CertificationCannotRunError: there are no cases for what trains the stack.
    """
    lock = _lock(session, selection, lock_name)
    matrix_name = matrix_name or selection.matrix_for(lock.lock.driver if lock else None)
    matrix = selection.catalog.matrix(matrix_name)
    # For its error: a stack without cases in the matrix is refused as its run is.
    driver_of(selection, matrix_name, lock.lock if lock else None)
    packages = lock.packages() if lock else ()
    cases = chosen_cases(matrix, matrix_name, selection, wanted, packages)
    capabilities = Capabilities.for_selection(selection, packages)
    # A case that is named and left out is refused as unknown.
    expanded = expansion(matrix, matrix_name, capabilities)
    out = () if wanted.only else (*expanded.left_out, *over_more_nodes(expanded.cases, wanted.nodes))
    if lock is not None and not run_known_wrong:
        conflicts = known_wrong_in(lock, selection.catalog)
        wrong = left_out(affected_cases(cases, matrix, conflicts), conflicts)
        cases = without_known_wrong(cases, wrong, wanted.only)
        out = (*out, *wrong)
    pairs = coverage(matrix, cases, capabilities)
    reasons = dict.fromkeys(case.why for case in out)
    width = max(len(case.id) for case in cases)
    session.done(
        {
            "matrix": matrix_name,
            "lock": lock.lock.digest if lock else None,
            "cases": [_case_json(case) for case in cases],
            "left_out": [{"id": case.id, "why": case.why} for case in out],
            "pairs": [_pair_json(pair) for pair in pairs],
        },
        *[f"{case.id:<{width}}  {_processes(case)}" for case in cases],
        *[f"left out, {why}: {', '.join(case.id for case in out if case.why == why)}" for why in reasons],
        *lines_of(pairs),
    )


def _lock(session: Session, selection: Selection, name: str | None) -> LockDirectory | None:
    """The lock, whose packages decide which cases are possible; None where the stack has none yet."""
    try:
        return find_lock(session.project, selection, name)
    except ConfigurationError as error:
        if name is not None:
            raise
        session.reporter.note(f"note: {error.what}: cases are left out by the packages that the stack's file names")
        return None


def _processes(case: Case) -> str:
    return ", then ".join(dict.fromkeys(_ranks(part) for part in case.parts))


def _ranks(part: Part) -> str:
    size = part.layout.world_size
    nodes = f" on {part.nodes} nodes" if part.nodes > 1 else ""
    return f"{size} process{'es' if size > 1 else ''}{nodes}"


def _case_json(case: Case) -> Json:
    return {
        "id": case.id,
        "processes": case.slots,
        "nodes": case.most_nodes,
        "baseline": case.compared_with,
        "compares_weights": case.compare_weights,
    }


def _pair_json(pair: Pair) -> Json:
    return {"axes": list(pair.axes), "state": pair.state, "cases": list(pair.cases), "why": pair.why or None}
