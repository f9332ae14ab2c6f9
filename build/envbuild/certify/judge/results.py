"""results.jsonl read: whole, as its schema has it, and of one plan; anything else is refused.

Its schema lives with smoke. What the numbers in it mean is the judge's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from envbuild.catalog.data import data_root
from envbuild.catalog.fields import TomlModel, moment_of
from envbuild.certify.certificate.statement import is_after
from envbuild.certify.models import EnvironmentFinding, Step
from envbuild.core import jsonread
from envbuild.core.digests import Json
from envbuild.core.errors import ResultsRefusedError
from envbuild.core.files import NotPlainFileError, read_plain

RESULTS_SCHEMA = "envbuild.results/2"
SCHEMA_FILE = "smoke/envbuild_smoke/schemas/result.schema.json"
# Reasons, for programs.
MISSING, SCHEMA, TRUNCATED, REPEATED, PLAN, IMAGE = "missing", "schema", "truncated", "repeated-case", "plan", "image"
SMOKE, MOMENT = "smoke", "moment"
# A thousand repeats of a hundred cases have some 200 MB.
LARGEST_BYTES = 2 << 30


class Weights(TomlModel):
    """How a case's final weights compare with its baseline's; None for a difference that is not finite."""

    compared_with: str
    tensors: int
    largest_relative_difference: float | None
    worst: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class TensorDifference(TomlModel):
    """How far a tensor is from the reference's; None for a difference that is not finite."""

    name: str
    relative_difference: float | None
    # What rounding may make of it, as the runner measured; of bf16.
    spread: float | None = None


class ReferenceStep(TomlModel):
    """A step of the reference; None for a number that is not finite."""

    loss: float | None
    grad_norm: float | None


class ReferenceComparison(TomlModel):
    """How a baseline compares with the reference; tensors are in the order of computation."""

    reason: str | None
    samples: str | None
    steps: tuple[ReferenceStep, ...]
    perturbed: tuple[tuple[ReferenceStep, ...], ...] | None = None
    activations: tuple[TensorDifference, ...]
    gradients: tuple[TensorDifference, ...]
    weights: tuple[TensorDifference, ...]
    seconds: float


class Gradient(TomlModel):
    """The gradient of a tensor in few numbers; its projections are on vectors of random signs."""

    name: str
    norm: float
    projections: tuple[float, ...]


class Perturbed(TomlModel):
    """A baseline's training with each weight moved by one unit in the last place.

    ``weights`` is the largest relative difference of a tensor of the final weights; None where it is not finite.
    """

    steps: tuple[Step, ...]
    gradients: tuple[Gradient, ...]
    weights: float | None


class CaseResult(TomlModel):
    """What the runner reports of one repeat of a case."""

    case: str
    status: str
    steps: tuple[Step, ...]
    seconds: float
    failure: Mapping[str, Any] | None
    repeat: int = 1
    devices: tuple[str | int, ...] = ()
    weights: Weights | None = None
    observed: Mapping[str, Any] | None = None
    reference: ReferenceComparison | None = None
    gradients: tuple[Gradient, ...] | None = None
    perturbed: tuple[Perturbed, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results.jsonl that belongs to one plan.

    Attributes:
        cases: by ID and repeat.
        machine: where it ran: GPUs, driver, CUDA, NCCL, variables.
        image: what the runner hashed before it started; None outside of an image.
        bandwidth: the line of the sweep of collectives.
        gpu_states_before: clocks, temperature, memory and throttling of the GPUs, as nvidia-smi prints them.
    """

    environment: Mapping[str, Any]
    environment_findings: tuple[EnvironmentFinding, ...]
    smoke_version: str
    started_at: str
    finished_at: str
    cases: Mapping[tuple[str, int], CaseResult]
    machine: Mapping[str, Any]
    image: Mapping[str, Any] | None = None
    isolation: str = "live"
    devices: tuple[Json, ...] = ()
    bandwidth: Mapping[str, Any] | None = None
    gpu_states_before: tuple[Mapping[str, str], ...] = ()
    gpu_states_after: tuple[Mapping[str, str], ...] = ()

    def of(self, case: str, repeat: int = 1) -> CaseResult | None:
        """One repeat of a case; None where the runner reported nothing about it."""
        return self.cases.get((case, repeat))


class _Refused(Exception):  # noqa: N818 - becomes a ResultsRefusedError where the file is known
    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def read_results(path: Path, plan: Mapping[str, Any], plan_digest: str, smoke_digest: str | None = None) -> Results:
    """Read the results of a plan.

    Args:
        plan: the plan as it was given to the runner; ``plan_digest`` is that of its bytes.
        smoke_digest: of the runner that had to be used; any when None.

    Raises:
        ResultsRefusedError: missing, cut off, malformed, with a case twice, or of another plan, image or runner.
    """
    try:
        return _read(path, plan, plan_digest, smoke_digest)
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


def _read(path: Path, plan: Mapping[str, Any], plan_digest: str, smoke_digest: str | None) -> Results:
    records = _records(path)
    run, end = _frame(records)
    _check_plan(run, plan, plan_digest)
    if smoke_digest is not None and run["smoke_digest"] != smoke_digest:
        used = run["smoke_digest"] or "one from its sources"
        raise _Refused(SMOKE, f"The runner that belongs to this envbuild is {smoke_digest}; it ran with {used}.")
    _check_image(run["image"], plan["subject"])
    found = [
        # Lines have more, which the schema has checked and no one here reads; the model would refuse it.
        CaseResult.model_validate({name: record[name] for name in CaseResult.model_fields if name in record})
        for record in records
        if record["type"] == "case"
    ]
    _check_cases(found, plan, end)
    bandwidths = [record for record in records if record["type"] == "bandwidth"]
    if len(bandwidths) > 1:
        raise _Refused(REPEATED, "The bandwidth is in it twice.")
    return Results(
        environment=run["environment"],
        environment_findings=_findings(run, records),
        smoke_version=run["smoke_version"],
        started_at=run["started_at"],
        finished_at=end["finished_at"],
        cases={(result.case, result.repeat): result for result in found},
        machine=run["machine"],
        image=run["image"],
        isolation=run["isolation"],
        devices=tuple(run["devices"]),
        bandwidth=bandwidths[0] if bandwidths else None,
        gpu_states_before=tuple(run.get("gpu_states", ())),
        gpu_states_after=tuple(end.get("gpu_states", ())),
    )


def _findings(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> tuple[EnvironmentFinding, ...]:
    """Differences from the lock: found before the cases, and in the ranks of any of them; each once."""
    found = list(run["environment_findings"])
    for record in records:
        if record["type"] == "case":
            found += (record["observed"] or {}).get("unlisted", [])
    return tuple(dict.fromkeys(EnvironmentFinding.model_validate(item) for item in found))


def _records(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, each as the schema has it."""
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
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _Refused(SCHEMA, f"It is not UTF-8: {error}") from error
    if lines[-1]:
        raise _Refused(TRUNCATED, "Its last line is incomplete.")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = _writable(jsonread.loads(line))
        except ValueError as error:
            raise _Refused(SCHEMA, f"Line {number} is not valid JSON: {error}") from error
        _check_schema(record, number)
        records.append(record)
    return records


def _writable(value: Any) -> Any:
    """A JSON value whose texts can be written as UTF-8: lone surrogates are escaped."""
    if isinstance(value, str):
        # JSON's \u escapes may leave half of a surrogate pair (RFC 8259, section 8.2), which no report could be written
        # with.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value


@cache
def _validators() -> Mapping[str, Any]:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    # To JSON schema 1.0 and 1e300 are integers; to the models of a certificate they are not.
    whole = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    validator = extend(Draft202012Validator, type_checker=whole)  # type: ignore[no-untyped-call]
    schema = json.loads((data_root() / SCHEMA_FILE).read_text())
    # One for each type: an error of oneOf would list what is wrong by every type.
    kinds = [item["$ref"].rsplit("/", 1)[1] for item in schema["oneOf"]]
    return {kind: validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]}) for kind in kinds}


def _check_schema(record: object, number: int) -> None:
    kind = record.get("type") if isinstance(record, dict) else None
    validator = _validators().get(kind) if isinstance(kind, str) else None
    if not isinstance(record, dict) or validator is None:
        raise _Refused(SCHEMA, f"Line {number} has an unknown type: {str(kind)[:40]!r}.")
    if record.get("schema") != RESULTS_SCHEMA:
        raise _Refused(SCHEMA, f"Line {number} has schema {str(record.get('schema'))[:60]!r}, not {RESULTS_SCHEMA}.")
    error = next(iter(sorted(validator.iter_errors(record), key=lambda error: list(map(str, error.path)))), None)
    if error is not None:
        where = ".".join(map(str, error.path)) or "it"
        raise _Refused(SCHEMA, f"Line {number} ({kind}): {where}: {error.message[:300]}")


def _frame(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first line and the last."""
    kinds = [record["type"] for record in records]
    if kinds[0] != "run" or kinds.count("run") != 1:
        raise _Refused(SCHEMA, f"It begins with {kinds[0]!r} and has {kinds.count('run')} lines of type run, not one.")
    if "end" not in kinds:
        raise _Refused(TRUNCATED, "The runner did not finish: the last line, of type end, is missing.")
    if kinds[-1] != "end" or kinds.count("end") != 1:
        raise _Refused(SCHEMA, "It has lines after the line of type end.")
    run, end = records[0], records[-1]
    started, finished = _moment(run["started_at"]), _moment(end["finished_at"])
    if finished < started:
        raise _Refused(MOMENT, f"It states that it began at {run['started_at']} and ended at {end['finished_at']}.")
    if is_after(end["finished_at"], datetime.now(timezone.utc)):
        raise _Refused(MOMENT, f"It states that it ended at {end['finished_at']}, which is in the future.")
    return run, end


def _moment(text: str) -> datetime:
    try:
        return moment_of(text)
    except ValueError:
        raise _Refused(SCHEMA, f"It has a timestamp that does not exist: {text!r:.60}.") from None


def _check_plan(run: Mapping[str, Any], plan: Mapping[str, Any], plan_digest: str) -> None:
    for name, stated, expected in (
        ("nonce", run["nonce"], plan["nonce"]),
        ("subject", run["subject"], dict(plan["subject"])),
        ("digest", run["plan_digest"], plan_digest),
    ):
        if stated != expected:
            why = f"its {name} is {stated!r:.500}, and this one's is {expected!r:.500}"
            raise _Refused(PLAN, f"They are of another plan: {why}.")


def _check_image(image: Mapping[str, Any] | None, subject: Mapping[str, str]) -> None:
    """What the runner hashed must be what the plan is about."""
    # Of the forms oci and docker the runner hashes the manifest, whose digest is the image's.
    expected = subject.get("sqsh_digest" if subject["form"] == "sqsh" else "oci_digest")
    if expected is None:
        if image is not None:
            raise _Refused(IMAGE, f"The plan is about a lock, and it ran in image {image['file_digest']}.")
        return
    if image is None:
        raise _Refused(IMAGE, f"The plan is about image {expected}; the runner got no image to hash (--image FILE).")
    if image["file_digest"] != expected:
        raise _Refused(IMAGE, f"The plan is about image {expected}; they are of {image['file_digest']}.")
    _check_fingerprint(image["fingerprint"], subject["lock_digest"])


def _check_fingerprint(fingerprint: Mapping[str, Any] | None, lock_digest: str) -> None:
    """The cases must have trained inside an image of the lock: the file that was hashed may be another."""
    if fingerprint is None:
        why = "The runner hashed the image's file, and ran outside of it: there was no /etc/envbuild/fingerprint.json."
        raise _Refused(IMAGE, why)
    if fingerprint.get("lock_digest") != lock_digest:
        stated = fingerprint.get("lock_digest")
        raise _Refused(
            IMAGE, f"The plan is about lock {lock_digest}; the image that ran was made from lock {stated!r:.100}."
        )


def _check_cases(found: Sequence[CaseResult], plan: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """Every line is of a case of the plan, no case is there twice, and no line was lost."""
    known, repeats = {case["id"] for case in plan["cases"]}, plan.get("repeats", 1)
    seen: set[tuple[str, int]] = set()
    for result in found:
        if result.case not in known or result.repeat > repeats:
            raise _Refused(PLAN, f"The plan has no case {result.case!r:.150} with repeat {result.repeat}.")
        if (result.case, result.repeat) in seen:
            raise _Refused(REPEATED, f"Case {result.case} is in it twice (repeat {result.repeat}).")
        seen.add((result.case, result.repeat))
    # Counts find lines that were lost in the middle; a lost end is found by its missing line.
    completed = sum(result.status == "completed" for result in found)
    if (end["cases"], end["completed"]) != (len(found), completed):
        raise _Refused(
            TRUNCATED,
            f"Its end states {end['completed']} of {end['cases']} completed cases; it has {completed} of {len(found)}.",
        )
