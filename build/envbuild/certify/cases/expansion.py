"""A matrix expanded into cases, and what is left out where it cannot run."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.catalog.matrix import Matrix
from envbuild.certify.cases.case import Capabilities, Case, ResolvedRow
from envbuild.certify.cases.rules import broken_rules, missing_capabilities
from envbuild.core.errors import ConfigurationError

# A case's ID names a directory; the plan's schema allows no longer one.
CASE_ID_LENGTH = 120


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A case of the matrix that is not for what it would run on, and why."""

    id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """A matrix on one device: its cases, baselines first, and those left out."""

    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def expand(matrix: Matrix, name: str, capabilities: Capabilities) -> tuple[Case, ...]:
    """The cases of :func:`expansion`."""
    return expansion(matrix, name, capabilities).cases


def expansion(matrix: Matrix, name: str, capabilities: Capabilities) -> Expansion:
    """All cases of a matrix on a device.

    Raises:
        ConfigurationError: the matrix is not for the device, a layout is impossible, a case is listed twice, or has no
            baseline or no tolerance.
    """
    if capabilities.device not in matrix.devices:
        raise ConfigurationError(
            f"matrix {name} is not for device {capabilities.device.value}",
            why=f"It names the devices: {', '.join(device.value for device in matrix.devices)}.",
            fix="Choose another matrix with --matrix (`envbuild list matrices`).",
        )
    reading = _Reading(matrix, capabilities)
    problems = reading.problems
    cases = {row.case.id: row.case for row in reading.rows}
    problems += [
        f"{case.id}: its baseline {case.baseline_id} is not among the cases"
        for case in cases.values()
        if case.baseline_id not in cases
    ]
    if problems:
        raise ConfigurationError(
            f"matrix {name} has cases that cannot be run",
            # Each once: a row has the problem of an unknown model for each of its sizes.
            why="\n".join(dict.fromkeys(problems)),
            fix=f"Correct envs/matrices/{name}.toml.",
        )
    # The sort is stable. Baselines come first, since the other cases start from the weights that they save.
    in_order = sorted(cases.values(), key=lambda case: not case.is_baseline)
    return Expansion(cases=tuple(in_order), left_out=tuple(reading.left_out))


def _values(case: Case) -> dict[str, object]:
    """The fields of a case, and those of its settings by themselves."""
    values = {**vars(case), **vars(case.settings)}
    # The one follows from overlap_p2p_comm.
    return {name: value for name, value in values.items() if name not in ("settings", "batch_p2p_comm")}


class _Reading:
    """The rows of a matrix, read one by one.

    Attributes:
        rows: those for this device, also those that break a rule.
    """

    def __init__(self, matrix: Matrix, capabilities: Capabilities) -> None:
        self.rows: list[ResolvedRow] = []
        self.problems: list[str] = []
        self.left_out: list[LeftOut] = []
        self._matrix = matrix
        self._by_id: dict[str, Case] = {}
        for position, written in enumerate(matrix.cases):
            for spec in written.specs():
                if spec["model"] not in matrix.models:
                    known = ", ".join(matrix.models)
                    self.problems.append(f"cases[{position}]: no model {spec['model']!r} is defined; defined: {known}")
                    continue
                row = ResolvedRow.from_matrix(spec, matrix, capabilities)
                if written.devices is not None and capabilities.device not in written.devices:
                    devices = " or ".join(device.value for device in written.devices)
                    self.left_out.append(LeftOut(id=row.case.id, why=f"it is for device {devices}"))
                else:
                    self._add(position, row, where_possible=written.where_possible)

    def _add(self, position: int, row: ResolvedRow, *, where_possible: bool) -> None:
        missing = missing_capabilities(row)
        # A broken rule is no reason to leave a row out: no environment can train it.
        if where_possible and missing:
            self.left_out.append(LeftOut(id=row.case.id, why="; ".join(missing)))
            return
        if rules := [*broken_rules(row), *missing]:
            self.problems.append(f"cases[{position}] ({row.case.id}): {'; '.join(rules)}")
        self.problems += [f"cases[{position}]: {problem}" for problem in self._problems(row)]
        self.rows.append(row)
        self._by_id.setdefault(row.case.id, row.case)

    def _problems(self, row: ResolvedRow) -> list[str]:
        case, problems = row.case, []
        if len(case.id) > CASE_ID_LENGTH:
            text = f"{case.id} has {len(case.id)} characters; an ID has at most {CASE_ID_LENGTH}"
            problems.append(f"{text}: shorten the model's name")
        if other := self._by_id.get(case.id):
            differing = [name for name, value in _values(case).items() if value != _values(other)[name]]
            names = ", ".join(differing)
            problems.append(
                f"{case.id} is the ID of another case too, which differs in {names}; IDs must differ"
                if differing
                else f"{case.id} is listed twice"
            )
        if case.precision not in self._matrix.tolerance:
            problems.append(f"there is no [tolerance.{case.precision}]")
        return problems
