"""results.jsonl read: whole, each line as the runner declares it, and of one plan; anything else is refused.

What the numbers in it mean is the judge's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from envbuild.catalog.fields import moment_of
from envbuild.certify.certificate.statement import is_after
from envbuild.core import jsonread
from envbuild.core.errors import ResultsRefusedError
from envbuild.core.files import NotPlainFileError, read_plain
from envbuild_smoke.network.hosts import MeasuredHosts, measured_hosts
from envbuild_smoke.plan.json_reader import PlanError, read_object
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.results import (
    KINDS,
    BandwidthLine,
    CaseLine,
    EndLine,
    Finding,
    GpuState,
    Image,
    Line,
    NodeLine,
    ResumedLine,
    RunLine,
)

# Reasons, for programs.
MISSING, SCHEMA, TRUNCATED, REPEATED, PLAN, IMAGE = "missing", "schema", "truncated", "repeated-case", "plan", "image"
SMOKE, MOMENT = "smoke", "moment"
# A thousand repeats of a hundred cases have some 200 MB.
LARGEST_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results.jsonl that belongs to one plan.

    Attributes:
        cases: by ID and repeat.
        nodes: what ran on other nodes than 0; of a run that was resumed several times for each.
        findings: differences from the lock, found before the cases and in the ranks of any of them; each once.
        gpu_states: of node 0, before the cases that ran last: it may have been resumed on another host.
    """

    run: RunLine
    end: EndLine
    cases: Mapping[tuple[str, int], CaseLine]
    findings: tuple[Finding, ...]
    gpu_states: tuple[GpuState, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    measured: MeasuredHosts = field(default_factory=MeasuredHosts)

    def case(self, case: str, repeat: int = 1) -> CaseLine | None:
        """One repeat of a case; None where the runner reported nothing about it."""
        return self.cases.get((case, repeat))

    def measuring(self, baseline: Case, repeat: int, plan: Plan) -> CaseLine | None:
        """What measured the bands of a repeat of a baseline, and of its cases; None where nothing was reported."""
        return self.case(baseline.id, plan.measuring_repeat(baseline, repeat))

    def name_of(self, node: int) -> str:
        """What people call a node: its number, and the name of its host."""
        hosts = [self.run.host] if node == 0 else [line.host for line in self.nodes if line.node == node]
        return f"node {node} ({' or '.join(dict.fromkeys(hosts))})" if hosts else f"node {node}"


class _Refused(Exception):  # noqa: N818 - becomes a ResultsRefusedError where the file is known
    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def read_results(path: Path, plan: Plan, smoke_digest: str | None = None) -> Results:
    """Read the results of a plan.

    Args:
        smoke_digest: of the runner that had to be used; any when None.

    Raises:
        ResultsRefusedError: missing, cut off, malformed, with a case twice, or of another plan, image or runner.
    """
    try:
        return _read(path, plan, smoke_digest)
    except _Refused as refused:
        raise ResultsRefusedError(
            f"the results in {path} cannot be judged",
            why=str(refused),
            fix=_FIXES.get(refused.reason, "Run the certification again."),
            log=path,
            reason=refused.reason,
        ) from refused


_FIXES = {
    MISSING: "Run it again. A plan for another machine is run as its README.md says, and its results/ is brought back.",
    TRUNCATED: "If the runner was interrupted, let it go on (--resume). If the file was copied, copy it again, whole.",
    PLAN: "Bring back the results of this plan, or run it (again). A plan's results are never judged by another plan.",
    IMAGE: "Run the plan in the image that it is for; its digests are in the plan under `subject`.",
    MOMENT: "Set the clock of the machine where it ran, or of this one, and run the plan again.",
    SMOKE: "Run the plan with the smoke.pyz that was written next to it. If it was, envbuild has changed since: "
    "judge with the one that wrote the plan, or write it again.",
}


def _read(path: Path, plan: Plan, smoke_digest: str | None) -> Results:
    lines = _lines(path)
    run, end = _frame(lines)
    _check_plan(run, plan)
    if smoke_digest is not None and run.smoke_digest != smoke_digest:
        used = run.smoke_digest or "one from its sources"
        raise _Refused(SMOKE, f"The runner that belongs to this envbuild is {smoke_digest}; it ran with {used}.")
    _check_image(run.image, plan.subject)
    cases = list(_standing_cases(lines))
    _check_cases(cases, plan, end)
    measured = measured_hosts(lines)
    _check_sweeps(measured.sweeps)
    unlisted = [finding for case in cases if case.observed is not None for finding in case.observed.unlisted]
    return Results(
        run=run,
        end=end,
        cases={(case.case, case.repeat): case for case in cases},
        findings=tuple(dict.fromkeys([*run.environment_findings, *unlisted])),
        gpu_states=[line.gpu_states for line in lines if isinstance(line, RunLine | ResumedLine)][-1],
        nodes=tuple(_nodes(lines, plan)),
        measured=measured,
    )


def _standing_cases(lines: Sequence[Line]) -> Iterator[CaseLine]:
    """The cases, without those that were ended from outside and trained again, where the run was resumed."""
    resumed = max((index for index, line in enumerate(lines) if isinstance(line, ResumedLine)), default=0)
    for index, line in enumerate(lines):
        if isinstance(line, CaseLine):
            ended_from_outside = line.failure is not None and line.failure.is_from_outside
            if index > resumed or not ended_from_outside:
                yield line


def _nodes(lines: Sequence[Line], plan: Plan) -> Iterator[NodeLine]:
    """What ran on other nodes while cases did, or last."""
    started: list[NodeLine] = []
    for line in lines:
        if isinstance(line, NodeLine):
            if line.node >= plan.nodes:
                raise _Refused(PLAN, f"It has a node {line.node}, and the plan is for {plan.nodes}.")
            started.append(line)
        elif isinstance(line, CaseLine | EndLine):
            yield from started
            started = []
        elif isinstance(line, ResumedLine):
            started = []


def _lines(path: Path) -> list[Line]:
    """The lines of the file, each of its type."""
    try:
        data = read_plain(path, LARGEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise _Refused(MISSING, "The runner wrote no results: there is no such file.") from None
    except NotPlainFileError as error:
        raise _Refused(SCHEMA, f"{error}.") from error
    except OSError as error:
        raise _Refused(MISSING, f"The file cannot be read: {error.strerror}.") from error
    if not data.strip():
        raise _Refused(MISSING, "The file is empty.")
    try:
        # Not splitlines(): it also splits at U+2028 and others, which JSON allows inside of texts (RFC 8259, section
        # 7).
        texts = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _Refused(SCHEMA, f"It is not UTF-8: {error}") from error
    if texts[-1]:
        raise _Refused(TRUNCATED, "Its last line is incomplete.")
    return [_line(text, number) for number, text in enumerate(texts[:-1], 1)]


def _line(text: str, number: int) -> Line:
    try:
        record = _writable(jsonread.loads(text))
    except ValueError as error:
        raise _Refused(SCHEMA, f"Line {number} is not valid JSON: {error}") from error
    name = record.get("type") if isinstance(record, dict) else None
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _Refused(SCHEMA, f"Line {number} has an unknown type: {str(name)[:40]!r}.")
    try:
        return read_object(kind, record, str(name))
    except PlanError as error:
        raise _Refused(SCHEMA, f"Line {number}: {error}") from error


def _writable(value: object) -> Any:
    """A JSON value whose texts can be written as UTF-8: lone surrogates are escaped."""
    if isinstance(value, str):
        # JSON's \u escapes may leave half of a surrogate pair (RFC 8259, section 8.2), which no report could be written
        # with.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(entry) for key, entry in value.items()}
    return [_writable(entry) for entry in value] if isinstance(value, list) else value


def _frame(lines: Sequence[Line]) -> tuple[RunLine, EndLine]:
    """The first line and the last."""
    kinds = [line.type for line in lines]
    run, end = lines[0], lines[-1]
    if not isinstance(run, RunLine) or kinds.count("run") != 1:
        raise _Refused(SCHEMA, f"It begins with {kinds[0]!r} and has {kinds.count('run')} lines of type run, not one.")
    if "end" not in kinds:
        raise _Refused(TRUNCATED, "The runner did not finish: the last line, of type end, is missing.")
    if not isinstance(end, EndLine) or kinds.count("end") != 1:
        raise _Refused(SCHEMA, "It has lines after the line of type end.")
    started, finished = _moment(run.started_at), _moment(end.finished_at)
    if finished < started:
        raise _Refused(MOMENT, f"It states that it began at {run.started_at} and ended at {end.finished_at}.")
    if is_after(end.finished_at, datetime.now(timezone.utc)):
        raise _Refused(MOMENT, f"It states that it ended at {end.finished_at}, which is in the future.")
    return run, end


def _moment(text: str) -> datetime:
    try:
        return moment_of(text)
    except ValueError:
        raise _Refused(SCHEMA, f"It has a timestamp that does not exist: {text!r:.60}.") from None


def _check_plan(run: RunLine, plan: Plan) -> None:
    for name, stated, expected in (
        ("nonce", run.nonce, plan.nonce),
        ("subject", run.subject, plan.subject),
        ("digest", run.plan_digest, plan.digest),
    ):
        if stated != expected:
            why = f"its {name} is {stated!r:.500}, and this one's is {expected!r:.500}"
            raise _Refused(PLAN, f"They are of another plan: {why}.")


def _check_image(image: Image | None, subject: Mapping[str, str]) -> None:
    """What the runner hashed must be what the plan is about."""
    # Of the forms oci and docker the runner hashes the manifest, whose digest is the image's.
    expected = subject.get("sqsh_digest" if subject["form"] == "sqsh" else "oci_digest")
    if expected is None:
        if image is not None:
            raise _Refused(IMAGE, f"The plan is about a lock, and it ran in image {image.file_digest}.")
        return
    if image is None:
        raise _Refused(IMAGE, f"The plan is about image {expected}; the runner got no image to hash (--image FILE).")
    if image.file_digest != expected:
        raise _Refused(IMAGE, f"The plan is about image {expected}; they are of {image.file_digest}.")
    # The cases must have trained inside an image of the lock: the file that was hashed may be another.
    if image.fingerprint is None:
        why = "The runner hashed the image's file, and ran outside of it: there was no /etc/envbuild/fingerprint.json."
        raise _Refused(IMAGE, why)
    lock_digest, stated = subject["lock_digest"], image.fingerprint.get("lock_digest")
    if stated != lock_digest:
        raise _Refused(
            IMAGE, f"The plan is about lock {lock_digest}; the image that ran was made from lock {stated!r:.100}."
        )


# How many nodes take part, by kind.
_NODES: Mapping[str, tuple[int, float]] = {"node": (1, 1), "pair": (2, 2), "ramp": (3, math.inf)}


def _check_sweeps(sweeps: Sequence[BandwidthLine]) -> None:
    """Each is there once, of as many nodes as its kind has, and was measured or failed."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for line in sweeps:
        name = f"The bandwidth of {line.sweep} {', '.join(map(str, line.nodes[:8]))}"
        least, most = _NODES[line.sweep]
        if list(line.nodes) != sorted(set(line.nodes)) or not least <= len(line.nodes) <= most:
            raise _Refused(SCHEMA, f"{name} is of other nodes than such a sweep has.")
        if (line.sweep, line.nodes) in seen:
            raise _Refused(REPEATED, f"{name} is in it twice.")
        seen.add((line.sweep, line.nodes))
        if line.failure is None and line.backend is None:
            raise _Refused(SCHEMA, f"{name} has neither a backend nor a failure.")


def _check_cases(cases: Sequence[CaseLine], plan: Plan, end: EndLine) -> None:
    """Every line is of a case of the plan, no case is there twice, and no line was lost."""
    known = {case.id: case for case in plan.cases}
    seen: set[tuple[str, int]] = set()
    for line in cases:
        if line.case not in known or line.repeat not in plan.runs_of(known[line.case]):
            raise _Refused(PLAN, f"The plan has no case {line.case!r:.150} with repeat {line.repeat}.")
        if line.nodes != plan.nodes_of(known[line.case], line.repeat):
            raise _Refused(PLAN, f"Repeat {line.repeat} of {line.case} is of nodes {line.nodes}, which it is not for.")
        if (line.case, line.repeat) in seen:
            raise _Refused(REPEATED, f"Case {line.case} is in it twice (repeat {line.repeat}).")
        seen.add((line.case, line.repeat))
        if (line.status == "completed") is not (line.failure is None):
            has = "with" if line.failure else "without"
            raise _Refused(SCHEMA, f"Case {line.case} is {line.status} {has} a failure.")
    # Counts find lines that were lost in the middle; a lost end is found by its missing line.
    completed = sum(line.status == "completed" for line in cases)
    if (end.cases, end.completed) != (len(cases), completed):
        raise _Refused(
            TRUNCATED,
            f"Its end states {end.completed} of {end.cases} completed cases; it has {completed} of {len(cases)}.",
        )
