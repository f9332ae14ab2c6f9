"""The rows of the ledger, as frozen types.

A row is known by its key, in most tables a digest. Two rows of one key are merged by :meth:`Row.rank`: the larger one
stays. So ledgers can be merged in any order, any number of times, with the same result.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints

from envbuild.catalog.fields import Moment, TomlModel
from envbuild.core.digests import canonical_json
from envbuild.core.errors import ConfigurationError
from envbuild.store.address import parse_address

StepName = Literal["lock", "wheels", "image", "certify", "publish", "bisect"]
StepState = Literal["done", "nothing", "failed", "waiting", "skipped"]
Fault = Literal["infrastructure", "build", "training", "check"]


def _repository(text: str) -> str:
    """Other machines write rows, too: what is a repository's name goes into commands and pages."""
    if text.startswith("/") or not text:
        return text
    try:
        parse_address(text if "://" in text else f"oci://{text}")
    except ConfigurationError as error:
        raise ValueError(f"it is not a repository: {error.why.splitlines()[0]}") from error
    return text


Repository = Annotated[str, AfterValidator(_repository)]
# OCI distribution-spec 1.1, "Pulling manifests".
Tag = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$")]
# A field of older rows, which is read past and written no more.
Retired: TypeAlias = Annotated[Any, Field(exclude=True)]
# Of the digits of a moment: the earlier one becomes the larger text.
_INVERSE = str.maketrans("0123456789", "9876543210")


class Row(TomlModel):
    """A row: a key, a stack, a target (empty where there is none) and a moment, by which it is found.

    A later version adds fields with defaults only, so that it reads the rows of an older one.

    Attributes:
        key_fields: the fields whose values are its key, with slashes between them.
        moment_field: when it came to be, for the order of rows.
        first_stays: of two rows of one key that are alike final, the earlier one stays; else the later one.
        within_a_second: what rows of one moment are ordered by, in SQL.
    """

    table: ClassVar[str]
    key_fields: ClassVar[tuple[str, ...]]
    moment_field: ClassVar[str]
    first_stays: ClassVar[bool] = False
    within_a_second: ClassVar[str] = "key"
    stack: str

    @property
    def key(self) -> str:
        """The key of the row."""
        return "/".join(str(getattr(self, name)) for name in self.key_fields)

    @property
    def of_target(self) -> str:
        """The target; empty for what has none, such as a lock."""
        return str(getattr(self, "target", ""))

    @property
    def moment(self) -> str:
        return str(getattr(self, self.moment_field))

    @property
    def is_final(self) -> bool:
        """Whether it replaces a row of its key that is not final: a night that ended, a revoked publication."""
        return False

    def body(self) -> str:
        """Its canonical JSON."""
        return canonical_json(self.model_dump(mode="json")).decode()

    def rank(self) -> tuple[bool, str, str]:
        """The order of rows of one key: whether it is final, its moment, then its text."""
        moment = self.moment.translate(_INVERSE) if self.first_stays else self.moment
        return (self.is_final, moment, self.body())


class LockedPart(TomlModel):
    """A component of a lock.

    Attributes:
        committed_at: of ``commit``, as the lock has it.
    """

    version: str
    asked: str = ""
    git: str | None = None
    commit: str | None = None
    committed_at: str | None = None
    follows: bool = False
    head: Retired = None


class LockRow(Row):
    """A lock."""

    table: ClassVar[str] = "locks"
    # One lock may have several names (envbuild lock --name).
    key_fields: ClassVar[tuple[str, ...]] = ("digest", "name")
    moment_field: ClassVar[str] = "seen_at"
    first_stays: ClassVar[bool] = True
    digest: str
    name: str
    base: str
    base_digest: str = Field(default="", description="of the base it was verified on; empty: not pinned by content")
    as_of: str = ""
    driver: str = ""
    components: dict[str, LockedPart]
    packages: dict[str, str] = Field(description="every locked version by its package")
    seen_at: Moment
    behind: Retired = None


class WheelRow(Row):
    """A wheel that was compiled, or found compiled, for a target."""

    table: ClassVar[str] = "wheels"
    key_fields: ClassVar[tuple[str, ...]] = ("digest", "target")
    moment_field: ClassVar[str] = "built_at"
    first_stays: ClassVar[bool] = True
    digest: str
    build_key: str
    package: str
    version: str
    target: str
    lock_digest: str
    size_bytes: int = 0
    seconds: float | None = Field(default=None, description="that compiling took; None where it was not compiled here")
    built_at: Moment


class ImageRow(Row):
    """An image of a lock for a target. ``size_bytes``: of its layers as they are shipped."""

    table: ClassVar[str] = "images"
    key_fields: ClassVar[tuple[str, ...]] = ("oci_digest", "sqsh_digest", "target")
    moment_field: ClassVar[str] = "built_at"
    first_stays: ClassVar[bool] = True
    oci_digest: str
    lock_digest: str
    base: str
    target: str
    sqsh_digest: str = ""
    size_bytes: int
    sqsh_size_bytes: int = 0
    layers: tuple[str, ...] = Field(default=(), description="digests of its layers, lowest first")
    base_digest: str = ""
    base_rebuilt: bool = False
    seconds: float | None = Field(default=None, description="that building took; None where it was not built here")
    built_at: Moment


class CaseRow(Row):
    """A case that ran once, with its curves; ``run`` names the certificate (its digest), or the night that failed.

    Attributes:
        step_seconds: the median of its steps.
        loss, grad_norm: by step; None where the number was not finite.
        problem: why it did not pass; empty where it did.
    """

    table: ClassVar[str] = "cases"
    key_fields: ClassVar[tuple[str, ...]] = ("run", "target", "case", "repeat")
    moment_field: ClassVar[str] = "measured_at"
    run: str
    case: str
    repeat: int = 1
    baseline: str | None = None
    base: str
    target: str
    lock_digest: str
    oci_digest: str = ""
    passed: bool
    problem: str = ""
    seconds: float | None = None
    step_seconds: float | None = None
    loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    measured_at: Moment


class CertificateRow(Row):
    """A certificate. ``seconds``: of all its cases together; ``measured_at``: its oldest numbers."""

    table: ClassVar[str] = "certificates"
    key_fields: ClassVar[tuple[str, ...]] = ("digest",)
    moment_field: ClassVar[str] = "issued_at"
    first_stays: ClassVar[bool] = True
    digest: str = Field(description="of the certificate's file")
    certificate_key: str = Field(description="of what decides its verdict")
    oci_digest: str = ""
    sqsh_digest: str = ""
    lock_digest: str
    base: str
    target: str
    keyid: str | None
    matrix: str
    matrix_digest: str
    matrix_is_shipped: bool
    whole_matrix: bool
    cases: int
    not_vouched: int = 0
    gpus: tuple[str, ...] = ()
    place: str = Field(default="", description="where its cases ran: sqsh, oci, venv, ...")
    seconds: float | None = None
    measured_at: Moment
    issued_at: Moment


class PublicationRow(Row):
    """An image as it was published for a target; ``repository`` is HOST/REPO.

    Attributes:
        size_bytes: of its layers.
        sqsh_place: the address of the .sqsh store; empty: the registry, as the image's referrer.
        certificate_digest, keyid, certified_at, measured_at: None where it was published uncertified.
        gpus: the SM names of its target.
    """

    table: ClassVar[str] = "publications"
    moment_field: ClassVar[str] = "published_at"
    repository: Repository
    tag: Tag
    moving_tag: Tag
    base: str
    target: str
    lock_name: str
    lock_digest: str
    oci_digest: str
    docker_digest: str | None = None
    size_bytes: int
    sqsh_digest: str | None = None
    sqsh_size_bytes: int = 0
    sqsh_place: str = ""
    certificate_digest: str | None = None
    keyid: str | None = None
    certified_at: Moment | None = None
    measured_at: Moment | None = None
    published_at: Moment
    base_digest: str = ""
    base_rebuilt: bool = False
    gpus: tuple[str, ...] = ()
    envbuild: str = ""
    revoked_at: Moment | None = None
    revoked_reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.repository}:{self.tag}@{self.oci_digest}"

    @property
    def is_final(self) -> bool:
        return self.revoked_at is not None

    @property
    def certified(self) -> bool:
        """Whether it was published with a certificate, and was not revoked since."""
        return self.certificate_digest is not None and self.revoked_at is None


class Moved(TomlModel):
    """A package that another lock has in another version; ``None``: not at all."""

    package: str
    before: str | None
    after: str | None


class NightRow(Row):
    """One run of ``envbuild nightly``; ``finished_at`` and ``exit_code`` are None until it ended."""

    table: ClassVar[str] = "nights"
    key_fields: ClassVar[tuple[str, ...]] = ("id",)
    moment_field: ClassVar[str] = "started_at"
    id: str
    targets: tuple[str, ...]
    repository: Repository = ""
    host: str = ""
    envbuild: str = ""
    started_at: Moment
    finished_at: Moment | None = None
    exit_code: int | None = None
    lock_name: str = ""
    lock_digest: str = ""
    previous_lock_digest: str = Field(default="", description="of the night before with another lock")
    moved: tuple[Moved, ...] = ()
    blocked: Retired = None

    @property
    def is_final(self) -> bool:
        return self.finished_at is not None


class StepError(TomlModel):
    """Why a step failed; the words of an error as ``--json`` has them, and whose fault it is."""

    fault: Fault
    kind: str
    exit_code: int
    what: str
    why: str = ""
    fix: str = ""
    reason: str = ""


class StepRow(Row):
    """A step of a night, for one target; the lock's has none.

    Attributes:
        state: ``nothing``: all of it was there; ``skipped``: a step before it failed or waits.
        position: among the steps of its night, as they ran.
        digest: of what came of it: a lock, an image, a certificate; of a failure: of all that decides it.
        attempts: how often it ran; a failure is repeated once.
        bytes_sent: to a registry or store.
        plan: the folder of a plan that waits for hardware.
    """

    table: ClassVar[str] = "steps"
    key_fields: ClassVar[tuple[str, ...]] = ("night", "target", "base", "name")
    moment_field: ClassVar[str] = "started_at"
    # Moments have whole seconds, and several steps may begin within one.
    within_a_second: ClassVar[str] = "json_extract(body, '$.position')"
    night: str
    target: str = ""
    name: StepName
    state: StepState
    base: str = ""
    started_at: Moment
    position: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    digest: str = ""
    lock_digest: str = ""
    attempts: int = 1
    note: str = ""
    plan: str = ""
    error: StepError | None = None

    @property
    def is_final(self) -> bool:
        return self.state != "waiting"


class BisectRow(Row):
    """The result of a bisection between two locks."""

    table: ClassVar[str] = "bisects"
    key_fields: ClassVar[tuple[str, ...]] = ("good", "bad", "target")
    moment_field: ClassVar[str] = "ended_at"
    night: str = ""
    target: str
    good: str = Field(description="digest of the lock that passed")
    bad: str = Field(description="digest of the lock that failed")
    component: str = ""
    before: str = ""
    after: str = ""
    commit: str = ""
    tests: int
    text: str
    ended_at: Moment


ROW_TYPES: tuple[type[Row], ...] = (
    LockRow,
    WheelRow,
    ImageRow,
    CaseRow,
    CertificateRow,
    PublicationRow,
    NightRow,
    StepRow,
    BisectRow,
)
