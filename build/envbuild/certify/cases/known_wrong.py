"""Which cases the locked versions are known to train wrongly (``envs/conflicts/``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from envbuild.catalog.conflict import Conflict, values_of
from envbuild.catalog.matrix import Matrix
from envbuild.certify.cases.case import Case
from envbuild.certify.cases.expansion import LeftOut


def affected_cases(
    cases: Iterable[Case], matrix: Matrix, entries: Mapping[str, Conflict]
) -> dict[str, tuple[str, ...]]:
    """The entries that are about each case or its baseline, by the case's ID; without cases that none is about."""
    cases = tuple(cases)
    entries_by_case = {
        case.id: tuple(name for name, entry in entries.items() if _affects(entry, case, matrix)) for case in cases
    }
    # What is compared with wrong numbers shows nothing.
    entries_by_case = {
        case.id: tuple(dict.fromkeys((*entries_by_case[case.id], *entries_by_case.get(case.baseline_id, ()))))
        for case in cases
    }
    return {name: names for name, names in entries_by_case.items() if names}


def _affects(entry: Conflict, case: Case, matrix: Matrix) -> bool:
    return any(entry.affects(values) for values in _values(case, matrix))


def _values(case: Case, matrix: Matrix) -> Iterator[dict[str, object]]:
    """The values of a case, in each of its layouts."""
    settings = {**vars(case.settings), "precision": case.precision, "resume_at": case.resume_at}
    for part in case.parts:
        yield values_of({**vars(part.layout), **settings}, case.training, matrix.models[case.model])


def left_out(affected: Mapping[str, tuple[str, ...]], entries: Mapping[str, Conflict]) -> tuple[LeftOut, ...]:
    """The affected cases as cases of a matrix that do not run."""
    reasons = {name: cause_and_cure(name, entry) for name, entry in entries.items()}
    return tuple(
        LeftOut(id=case, why=f"known to train wrongly: {' '.join(reasons[name] for name in names)}")
        for case, names in affected.items()
    )


def cause_and_cure(name: str, entry: Conflict) -> str:
    """What an entry is about, its name, and what to do."""
    return f"{entry.summary} ({name}). {entry.fix}"
