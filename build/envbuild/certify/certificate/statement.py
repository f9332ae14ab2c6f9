"""The content of a certificate: an in-toto Statement, as strict models.

Format: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md

The subjects come from ``subject``: an image's digests where one was certified, else the lock's. ``cases`` are in the
form that ``--json`` shows (:class:`CaseVerdict`), and so are those of reports, where they may have failed.

The seal is the digest of the statement but itself. It finds a statement that was edited by accident, also where
there is no signature; an attacker can write a seal too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_validator

from envbuild.catalog.fields import MOMENT_FORMAT, Moment, TomlModel, moment_of
from envbuild.certify.fields.account import FieldAccount
from envbuild.certify.models import CaseVerdict, NotVouched
from envbuild.core.digests import Json, digest_of
from envbuild.core.validation import Digest
from envbuild.launch.executors import Form
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.models import COLLECTIVES
from envbuild_smoke.results import Gpu, Image, Machine, Point, Sweep

STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["urn:envbuild:certificate:4"] = "urn:envbuild:certificate:4"
# Of the version before, in which one word, ``in``, stood for form and launcher.
OLDER_TYPE: Literal["urn:envbuild:certificate:3"] = "urn:envbuild:certificate:3"
# How far the clocks of two machines may differ.
CLOCK_SKEW = timedelta(minutes=5)
CERTIFICATE_FILE = "certificate.intoto.jsonl"

JsonObject = Mapping[str, Json]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Sha256(TomlModel):
    """A digest as in-toto writes it: hex digits under the algorithm's name."""

    sha256: Hex


class CertifiedThing(TomlModel):
    """A subject of the statement: an image in one of its forms, or a lock."""

    name: str
    digest: Sha256


class MeasuredBandwidth(TomlModel):
    """What all_reduce (``points``), all_gather and all_to_all moved over the ranks of some nodes."""

    sweep: Sweep = "node"
    nodes: tuple[int, ...] = (0,)
    ranks: int
    backend: str | None
    transports: tuple[str, ...] | None
    points: tuple[Point, ...]
    all_gather: tuple[Point, ...] = ()
    all_to_all: tuple[Point, ...] = ()
    floor_gigabytes_per_second: float | None = Field(default=None, description="of all_reduce")
    failure: str | None = Field(default=None, description="why it has no figures; in reports alone")

    @property
    def best(self) -> dict[str, float]:
        """The best bus bandwidth of each collective, in GB/s."""
        points = dict(zip(COLLECTIVES, (self.points, self.all_gather, self.all_to_all), strict=True))
        return {
            name: max(point.bus_gigabytes_per_second for point in measured)
            for name, measured in points.items()
            if measured
        }


class NodeRecord(TomlModel):
    """A node of a run, as it recorded itself before its cases."""

    node: int
    host: str = Field(description="its name, Slurm's where it was under Slurm")
    gpus: tuple[Gpu, ...] = Field(description="each with its driver")
    image: Digest | None = Field(description="of the image's file; null outside of an image")


class SmokeRunner(TomlModel):
    """What ran the cases."""

    version: str
    digest: Digest


class Measured(TomlModel):
    """What a run measured next to its cases."""

    smoke: SmokeRunner
    environment: dict[str, JsonValue]
    machine: Machine | None = None
    image: Image | None = None
    nodes: tuple[NodeRecord, ...] = Field(
        default=(), description="in their order; of a run that was resumed on other hosts, each of them"
    )
    bandwidth: MeasuredBandwidth | None = Field(default=None, description="on node 0")
    network: tuple[MeasuredBandwidth, ...] = Field(
        default=(), description="of several nodes, each sweep: on every node, across pairs, over ever more nodes"
    )
    isolation: Literal["live", "process"] | None = None
    devices: tuple[str | int, ...] = ()
    gpu_states_before: tuple[dict[str, str], ...] = Field(
        default=(), description="clocks, temperature, throttling, ..."
    )
    gpu_states_after: tuple[dict[str, str], ...] = ()
    started_at: Moment
    finished_at: Moment


class CertifiedRun(TomlModel):
    """What certificates and reports state of a run."""

    stack: str
    base: str
    target: str
    form: Form = Field(description="of the image in which the cases ran")
    launcher: str = Field(pattern="^[a-z][a-z0-9-]{0,39}$", description="what ran them")
    runtime: str | None = Field(description="how the .sqsh was opened")
    lock_digest: Digest
    matrix: str
    matrix_is_shipped: bool = Field(description="it is what that envbuild ships under its name; else the project's own")
    whole_matrix: bool
    plan_digest: Digest
    nonce: str
    envbuild: str
    judge: int
    measured: Measured
    cases: tuple[CaseVerdict, ...]
    not_vouched: tuple[NotVouched, ...] = Field(
        default=(), description="what the locked versions are known to train wrongly"
    )
    fields: FieldAccount | None = Field(
        default=None, description="the library's configuration; none where the driver reports none"
    )

    @property
    def place(self) -> Placement:
        """Where the cases ran."""
        return Placement(form=self.form, launcher=self.launcher)


class Predicate(CertifiedRun):
    """What a certificate states of its subjects."""

    key: Digest = Field(description="of everything that decides the verdict")
    verdict: Literal["passed"]
    lock_is_current: bool = Field(description="made from the stack and the base as they were at issued_at")
    matrix_digest: Digest = Field(description="of its definition as it trained: models, training, cases, tolerances")
    tolerance: dict[str, JsonValue]
    issued_at: Moment
    seal: Digest = Field(description="digest of everything else in the statement: it is not edited by hand")

    @property
    def excused(self) -> frozenset[str]:
        """The cases of the matrix that did not pass, and are known to train wrongly."""
        outcomes = (case for entry in self.not_vouched for case in entry.cases)
        return frozenset(case.id for case in outcomes if case.result != "passed")

    @model_validator(mode="after")
    def _every_case_passed(self) -> Predicate:
        if not self.cases:
            raise ValueError("it has no case")
        for case in self.cases:
            if not case.passed or case.problems:
                raise ValueError(f"{case.id} did not pass")
            if not case.steps or any(step.loss is None or step.grad_norm is None for step in case.steps):
                raise ValueError(f"{case.id} has no numbers, or some that are not finite")
        return self


@dataclass(frozen=True, kw_only=True)
class WantedCertificate:
    """What a certificate has to be about.

    Attributes:
        subject: the plan's.
        known_wrong: cases that may have failed, and are not among its own then.
    """

    name: str
    subject: Mapping[str, Json]
    key: str
    case_ids: Sequence[str]
    known_wrong: Collection[str]
    matrix_digest: str
    matrix_is_shipped: bool


class Certificate(TomlModel):
    model_config = ConfigDict(populate_by_name=True)

    # To pydantic a name that begins with an underscore is a private attribute.
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[CertifiedThing, ...] = Field(min_length=1)
    predicate_type: Literal["urn:envbuild:certificate:3", "urn:envbuild:certificate:4"] = Field(alias="predicateType")
    predicate: Predicate

    @model_validator(mode="after")
    def _subjects_fit_where_it_ran(self) -> Certificate:
        kinds = [thing.name.rpartition(".")[2] for thing in self.subject]
        if len(set(kinds)) != len(kinds):
            raise ValueError("it names a subject twice")
        if self.predicate.form == "none":
            if kinds != ["lock"]:
                raise ValueError(f"a run in {self.predicate.place} certifies a lock and no image; it names {kinds}")
        # No run has docker's digest alone: it follows from the OCI manifest, which the runner hashes.
        elif not set(kinds) <= {"oci", "sqsh", "docker"} or kinds == ["docker"]:
            raise ValueError(f"a run in an image certifies that image; it names {kinds}")
        if kinds == ["lock"] and f"sha256:{self.subject[0].digest.sha256}" != self.predicate.lock_digest:
            raise ValueError("its subject is another lock than its lock_digest")
        return self

    def digests(self) -> dict[str, str]:
        """``sha256:...`` of each subject by its name."""
        return {thing.name: f"sha256:{thing.digest.sha256}" for thing in self.subject}

    def by_form(self) -> dict[str, str]:
        """``sha256:...`` of each subject by what it is: ``oci``, ``sqsh`` and ``docker``, or ``lock``."""
        return {name.rpartition(".")[2]: digest for name, digest in self.digests().items()}

    def measurements(self) -> list[str]:
        """The moments at which its numbers were measured."""
        measured = self.predicate.measured
        reused = [case.reused.from_ for case in self.predicate.cases if case.reused]
        return [measured.started_at, measured.finished_at, *reused]

    def future(self, at: datetime) -> str:
        """Why it is from after a moment, or measured after it was issued; empty when it is not."""
        issued, newest = self.predicate.issued_at, max(self.measurements())
        if is_after(issued, at):
            return f"it was issued at {issued}, after the moment of verification, {at.strftime(MOMENT_FORMAT)}"
        if is_after(newest, moment_of(issued)):
            return f"its newest numbers are from {newest}, after it was issued ({issued})"
        return ""

    def mismatch(self, wanted: WantedCertificate) -> str:
        """Why it is not the certificate of a subject, key, cases and matrix; empty when it is."""
        # A case has an entry for each of its repeats.
        cases = list(dict.fromkeys(case.id for case in self.predicate.cases))
        if self.predicate.key != wanted.key:
            return f"it is of key {self.predicate.key}"
        # Docker's digest follows from the OCI manifest; certificates of older versions lack it.
        without_docker = {thing: digest for thing, digest in self.digests().items() if not thing.endswith(".docker")}
        if without_docker != subject_digests(wanted.name, wanted.subject):
            return f"it is about {', '.join(f'{thing} {digest}' for thing, digest in self.digests().items())}"
        if cases != [case for case in wanted.case_ids if case in cases or case not in wanted.known_wrong]:
            return f"its cases are {', '.join(cases)}"
        if self.predicate.matrix_digest != wanted.matrix_digest:
            return f"its matrix {self.predicate.matrix} had another definition ({self.predicate.matrix_digest})"
        if self.predicate.matrix_is_shipped != wanted.matrix_is_shipped:
            return f"envbuild shipped another matrix {self.predicate.matrix} when it was made"
        return ""


def subject_digests(name: str, subject: Mapping[str, Json]) -> dict[str, str]:
    """The digest of each subject by its name; ``subject`` is the plan's.

    A run outside of an image certifies the lock, whatever else is named.
    """
    if subject["form"] == "none":
        return {f"{name}.lock": str(subject["lock_digest"])}
    forms = {f"{name}.{form}": str(subject.get(f"{form}_digest") or "") for form in ("oci", "sqsh")}
    return {form: digest for form, digest in forms.items() if digest}


def in_current_form(statement: JsonObject) -> JsonObject:
    """A statement of this version or the one before, with the fields of this version.

    Raises:
        KeyError, ValueError: it is no statement of the version before, although it says so.
    """
    if statement["predicateType"] != OLDER_TYPE:
        return statement
    predicate = dict(_predicate(statement))
    place = Placement.parse(str(predicate.pop("in")))
    return {**statement, "predicate": {**predicate, "form": place.form, "launcher": place.launcher}}


def make_certificate(subjects: Mapping[str, str], predicate: JsonObject) -> dict[str, Json]:
    """The sealed statement as a JSON value.

    Args:
        subjects: the digest of each subject by its name (:func:`subject_digests`).
        predicate: all of it but the seal.

    Raises:
        pydantic.ValidationError: it would not be a certificate: a case failed, or a digest has another form.
    """
    statement: dict[str, Json] = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for name, digest in subjects.items()
        ],
        "predicateType": PREDICATE_TYPE,
    }
    seal = seal_of({**statement, "predicate": dict(predicate)})
    statement["predicate"] = {**predicate, "seal": seal}
    Certificate.model_validate(statement)
    return statement


def seal_of(statement: JsonObject) -> str:
    """The digest of everything in a statement but its seal."""
    predicate = {key: value for key, value in _predicate(statement).items() if key != "seal"}
    return digest_of({**statement, "predicate": predicate})


def _predicate(statement: JsonObject) -> JsonObject:
    predicate = statement["predicate"]
    if not isinstance(predicate, dict):
        raise ValueError("its predicate is not an object")  # noqa: TRY004 - of a file, not of a caller
    return predicate


def is_after(moment: str, at: datetime) -> bool:
    """Whether a moment is after another one by more than the clocks of two machines may differ."""
    # Not at + CLOCK_SKEW: that may be after the last moment that there is.
    return moment_of(moment) - at > CLOCK_SKEW
