"""What is to be certified, with what, and where its files go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Selection, digest_without_summary
from envbuild.catalog.cluster import Floors
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.shipped_conflicts import SHIPPED, excuse_digest
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.known_wrong import affected_cases, left_out
from envbuild.certify.cases.selection import ALL, WantedCases, chosen_cases, driver_of, without_known_wrong
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.run.plan import Environment, Network, Subject, certification_key, make_plan
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.image.output import PlacedImage, image_name
from envbuild.launch.launchers import ON_CLUSTER, SQSH, Placement
from envbuild.lock.inputs.request import is_older
from envbuild.lock.known_wrong import known_wrong_in
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.local import LocalStore
from envbuild.sync.zipapp import smoke_file

# Their results have some 200 MB with a hundred cases.
MOST_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class CertifyRequest:
    """What a user wants certified.

    Attributes:
        wanted: the cases to run, where it is not the whole matrix.
        place: where the cases train.
        image: the image that is certified; None where it is a lock.
        lock_name: of the lock, where it is not the stack's own.
        repeats: how often every case is trained.
        run_known_wrong: also run cases that the locked versions are known to train wrongly.
        cluster: where they train, if their network has to be as that cluster's file says.
    """

    selection: Selection
    lock: LockDirectory
    matrix_name: str
    out_dir: Path
    wanted: WantedCases = ALL
    place: Placement = SQSH
    image: PlacedImage | None = None
    lock_name: str | None = None
    repeats: int = 1
    run_known_wrong: bool = False
    cluster: str | None = None

    @property
    def network(self) -> Network:
        """The nodes that it runs on, and what the cluster's file says of their network.

        Raises:
            ConfigurationError: the cluster is not known, or is named for its floors alone and has none for the target.
        """
        if self.cluster is None:
            return Network(nodes=self.wanted.nodes)
        target, cluster = self.selection.target_name, self.selection.catalog.cluster(self.cluster)
        floors = cluster.floors.get(target, Floors())
        if cluster.launcher == "here" and not floors.node:
            raise ConfigurationError(
                f"cluster {self.cluster} has no bandwidth floor for target {target}",
                why=f"envs/clusters/{self.cluster}.toml has no [floors.{target}.node].",
                fix="Add it with the bus bandwidth of all_reduce and all_gather, or leave --on out.",
            )
        transport = cluster.transport.network if cluster.transport else None
        return Network(nodes=self.wanted.nodes, floors=floors, transport=transport)

    @property
    def name(self) -> str:
        """What it is called in certificates, and where its files are."""
        if self.image is not None:
            return self.image.name
        selection = self.selection
        return image_name(self.lock_name or selection.stack_name, selection.base_name, selection.target_name)


@dataclass(frozen=True, kw_only=True)
class CertifyJob:
    """A certification: the plan that a request gives, and what decides its certificate.

    Attributes:
        plan: of all its cases.
        key: the digest of all that decides the certificate.
        conflicts: what the locked versions are known to train wrongly, by name.
        known_wrong: the names of the conflicts about each case of the matrix that there are any about, by its ID.
        matrix_is_shipped: whether the matrix is what envbuild ships under its name.
        whole_matrix: whether all of the matrix's cases were asked for.
        own_conflicts: those of ``conflicts`` that are the project's own, and excuse no case.
        folder: where its certificate goes, and the files of its run.
    """

    request: CertifyRequest
    plan: dict[str, Json]
    key: str
    cases: tuple[Case, ...]
    conflicts: Mapping[str, Conflict]
    known_wrong: Mapping[str, tuple[str, ...]]
    matrix: Matrix
    matrix_is_shipped: bool
    whole_matrix: bool
    own_conflicts: frozenset[str]
    lock_is_current: bool
    subject: Subject
    driver: Driver
    smoke: Path
    smoke_digest: str
    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / CERTIFICATE_FILE

    @property
    def certifies_image(self) -> bool:
        """Whether it is about an image; else about a lock."""
        return self.request.place.has_image

    @property
    def matrix_digest(self) -> str:
        """The digest of what the matrix trains and allows."""
        return digest_without_summary(self.matrix)

    @property
    def unexcused(self) -> frozenset[str]:
        """The cases that only the project's own conflicts say are trained wrongly."""
        return _unexcused(self.known_wrong, self.own_conflicts)

    @property
    def on_gpus(self) -> bool:
        return self.request.selection.target.device is Device.CUDA

    @property
    def ranks(self) -> int:
        """How many ranks its largest case has."""
        return max(case.slots for case in self.cases)


def make_job(request: CertifyRequest, store: LocalStore, subject: Subject | None = None) -> CertifyJob:
    """The job of a request.

    Args:
        subject: what it is about, where a plan states it already.

    Raises:
        ConfigurationError: the image is of another lock, or lacks what is certified.
        CertificationCannotRunError: all that is compared is known to be trained wrongly.
    """
    selection, lock = request.selection, request.lock.lock
    driver = driver_of(selection, request.matrix_name, lock)
    matrix = selection.catalog.matrix(request.matrix_name)
    packages = request.lock.packages()
    cases = chosen_cases(matrix, request.matrix_name, selection, request.wanted, packages)
    # Every case may be wanted by its name: that is the whole matrix too.
    every = (
        cases
        if not request.wanted
        else chosen_cases(matrix, request.matrix_name, selection, WantedCases(nodes=request.wanted.nodes), packages)
    )
    whole = len(cases) == len(every)
    # After that: without the cases that are known to be wrong it is the whole matrix still, and not_vouched has them. A
    # project's own conflicts make it a part: certificates would count for as little as the project likes.
    conflicts = known_wrong_in(request.lock, selection.catalog)
    own = frozenset(name for name, entry in conflicts.items() if excuse_digest(entry) not in SHIPPED)
    known_wrong = affected_cases(cases, matrix, conflicts)
    if not request.run_known_wrong:
        cases = without_known_wrong(cases, left_out(known_wrong, conflicts), request.wanted.only)
    smoke, smoke_digest = smoke_file(store)
    subject = subject or subject_of(request)
    plan = _plan(request, subject, driver, matrix, cases)
    if request.cluster and request.place.launcher not in ON_CLUSTER and not plan["bandwidth"]:
        raise UsageError(
            f"--on {request.cluster} has no effect",
            why=f"Matrix {request.matrix_name} measures no bandwidth here: that takes two GPUs and its [bandwidth].",
            fix="Leave it out, or choose another matrix or more GPUs.",
        )
    is_part = not whole or _unexcused(known_wrong, own)
    scope = f"part of {request.matrix_name}" if is_part else request.matrix_name
    key = certification_key(plan, matrix, smoke_digest, scope=scope, conflicts=conflicts)
    return CertifyJob(
        request=request,
        plan=plan,
        key=key,
        cases=cases,
        conflicts=conflicts,
        known_wrong=known_wrong,
        matrix=matrix,
        matrix_is_shipped=selection.catalog.ships("matrices", request.matrix_name),
        whole_matrix=whole,
        own_conflicts=own,
        lock_is_current=not is_older(lock, selection),
        subject=subject,
        driver=driver,
        smoke=smoke,
        smoke_digest=smoke_digest,
        # 12 digits, for people; a certificate found there is compared with the whole key.
        folder=request.out_dir / "certificates" / request.name / key.removeprefix("sha256:")[:12],
    )


def _unexcused(known_wrong: Mapping[str, tuple[str, ...]], own_conflicts: frozenset[str]) -> frozenset[str]:
    return frozenset(case for case, names in known_wrong.items() if own_conflicts.issuperset(names))


def subject_of(request: CertifyRequest) -> Subject:
    """What a certificate would be about.

    Raises:
        ConfigurationError: the image is of another lock, or has no .sqsh where one is needed.
    """
    selection, image, lock_digest = request.selection, request.image, request.lock.lock.digest
    bare = Subject(
        name=request.name,
        stack=selection.stack_name,
        base=selection.base_name,
        target=selection.target_name,
        lock_digest=lock_digest,
        place=request.place,
    )
    if image is None:
        return bare
    record = image.record
    if record.lock_digest != lock_digest:
        raise ConfigurationError(
            f"the image in {image.path} was made from another lock",
            why=f"It has lock {record.lock_digest}; the lock now is {lock_digest}.",
            fix=f"Build it again: {image.command}",
        )
    if request.place.form == "sqsh":
        if record.sqsh_digest is None:
            image.sqsh()  # its error explains how to make one
        return replace(bare, oci_digest=record.oci_digest, sqsh_digest=record.sqsh_digest)
    # In layers and in docker the .sqsh is not opened, and so not certified.
    return replace(bare, oci_digest=record.oci_digest)


def _plan(
    request: CertifyRequest, subject: Subject, driver: Driver, matrix: Matrix, cases: tuple[Case, ...]
) -> dict[str, Json]:
    lock = request.lock
    packages, components = lock.packages(), lock.lock.components
    environment = Environment(
        capabilities=Capabilities.for_selection(request.selection, packages),
        driver=driver,
        versions={**packages, **{name: component.version for name, component in components.items()}},
        modules=[module for component in components.values() for module in component.modules],
        provided=sorted(lock.lock.base.provides),
    )
    return make_plan(subject, environment, matrix, cases, request.repeats, request.network)
