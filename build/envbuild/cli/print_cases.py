"""``envbuild certify --print-cases``: the cases of a matrix for a target, and which of them are left out and why."""

from __future__ import annotations

from envbuild.catalog.catalog import Selection
from envbuild.certify.cases import Case, expansion
from envbuild.certify.choosing import chosen_cases
from envbuild.certify.ground import Ground
from envbuild.cli.common import Session
from envbuild.core.digests import Json


def print_cases(session: Session, selection: Selection, matrix_name: str, only: tuple[str, ...]) -> None:
    """Print the cases that would run, or those named in ``only`` with their baselines."""
    matrix = selection.catalog.matrix(matrix_name)
    cases = chosen_cases(matrix, matrix_name, selection, only)
    left_out = () if only else expansion(matrix, matrix_name, Ground.of(selection)).left_out
    reasons = dict.fromkeys(item.why for item in left_out)
    width = max(len(case.id) for case in cases)
    session.done(
        {
            "matrix": matrix_name,
            "cases": [_case_json(case) for case in cases],
            "left_out": [{"id": item.id, "why": item.why} for item in left_out],
        },
        *[f"{case.id:<{width}}  {_processes(case)}" for case in cases],
        *[f"left out, {why}: {', '.join(item.id for item in left_out if item.why == why)}" for why in reasons],
    )


def _processes(case: Case) -> str:
    return f"{case.world_size} process{'es' if case.world_size > 1 else ''}"


def _case_json(case: Case) -> Json:
    return {
        "id": case.id,
        "processes": case.world_size,
        "baseline": None if case.is_baseline else case.baseline_id,
        "compares_weights": case.compare_weights,
    }
