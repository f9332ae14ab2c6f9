"""The rows of the ledger for what a night made."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envbuild.catalog.fields import TomlModel
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.models import CaseVerdict
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CertificationFailedError
from envbuild.image.output import PlacedImage
from envbuild.ledger.models import (
    CaseRow,
    CertificateRow,
    ImageRow,
    LockedPart,
    LockRow,
    Moved,
    PublicationRow,
    Row,
    WheelRow,
)
from envbuild.lock.lockfile import LockDirectory
from envbuild.nightly.models import Job
from envbuild.publish.models import Publication
from envbuild.wheels.cache.wheelhouse import Built


def lock_row(directory: LockDirectory, name: str, at: str) -> LockRow:
    """The row of a lock; ``name``: the stack's, or its own."""
    lock = directory.lock
    return LockRow(
        stack=lock.stack,
        digest=lock.digest,
        name=name,
        base=lock.base.name,
        base_digest=lock.base_image,
        as_of=lock.inputs.as_of,
        driver=lock.driver.value if lock.driver else "",
        components={
            part: LockedPart(**_named_alike(LockedPart, component)) for part, component in lock.components.items()
        },
        packages=directory.packages(),
        seen_at=at,
    )


def wheel_rows(made: Iterable[Built], job: Job, at: str) -> list[WheelRow]:
    return [
        WheelRow(
            stack=job.selection.stack_name,
            digest=built.record.digest,
            build_key=built.record.key,
            package=built.record.parts.package,
            version=built.record.parts.version,
            target=job.target,
            lock_digest=job.lock.lock.digest,
            size_bytes=built.record.size_bytes,
            seconds=built.record.build_seconds if built.built else None,
            built_at=at,
        )
        for built in made
    ]


def _named_alike(kind: type[TomlModel], source: object) -> dict[str, Any]:
    """The fields of a row that its source has under the same name."""
    return {name: getattr(source, name) for name in kind.model_fields if hasattr(source, name)}


def image_row(image: PlacedImage, seconds: float | None, at: str) -> ImageRow:
    """The row of an image; ``seconds``: that building took, None where it was not built."""
    record = image.record
    own = {
        "sqsh_digest": record.sqsh_digest or "",
        "size_bytes": sum(layer.size_bytes for layer in record.layers),
        "sqsh_size_bytes": record.sqsh.size_bytes if record.sqsh else 0,
        "layers": tuple(layer.digest for layer in record.layers),
        "seconds": seconds,
        "built_at": at,
    }
    return ImageRow(**_named_alike(ImageRow, record) | own)


def certificate_rows(path: Path) -> list[Row]:
    """The rows of a certificate and of its cases.

    Raises:
        CertificateRefusedError: it is damaged.
    """
    statement, file = read_certificate(path)
    predicate, digest = statement.predicate, sha256_file(path)
    digests = statement.by_form()
    machine = predicate.measured.machine
    own = {
        "digest": digest,
        "certificate_key": predicate.key,
        "oci_digest": digests.get("oci", ""),
        "sqsh_digest": digests.get("sqsh", ""),
        "keyid": file.keyid,
        # Repeats are one case.
        "cases": len({case.id for case in predicate.cases}),
        "not_vouched": len(predicate.not_vouched),
        "gpus": tuple(gpu.name for gpu in machine.gpus) if machine else (),
        "place": str(predicate.place),
        "seconds": sum(case.seconds or 0.0 for case in predicate.cases),
        "measured_at": min(statement.measurements()),
    }
    certificate = CertificateRow(**_named_alike(CertificateRow, predicate) | own)
    about = {name: getattr(certificate, name) for name in ("stack", "base", "target", "lock_digest", "oci_digest")}
    return [certificate, *(_case_row(case, digest, about, predicate.issued_at) for case in predicate.cases)]


def failed_case_rows(error: CertificationFailedError, job: Job, night: str, at: str) -> list[Row]:
    """The rows of the cases of a certification that failed; none where it has no results."""
    cases: Sequence[Mapping[str, Any]] = error.run.cases if error.run else ()
    try:
        verdicts = [CaseVerdict.model_validate(dict(case)) for case in cases]
    except ValidationError:
        return []
    about = {
        "stack": job.selection.stack_name,
        "base": job.selection.base_name,
        "target": job.target,
        "lock_digest": job.lock.lock.digest,
        "oci_digest": job.image.record.oci_digest if job.image else "",
    }
    return [_case_row(verdict, night, about, at) for verdict in verdicts]


def _case_row(verdict: CaseVerdict, run: str, about: Mapping[str, str], at: str) -> CaseRow:
    """The row of a case; ``about``: stack, base, target and digests of what it trained."""
    seconds = [step.seconds for step in verdict.steps if step.seconds is not None]
    own = {
        **about,
        "run": run,
        "case": verdict.id,
        "problem": str(verdict.problems[0]) if verdict.problems else "",
        "step_seconds": statistics.median(seconds) if seconds else None,
        "loss": tuple(step.loss for step in verdict.steps),
        "grad_norm": tuple(step.grad_norm for step in verdict.steps),
        "measured_at": at,
    }
    return CaseRow(**_named_alike(CaseRow, verdict) | own)


def publication_row(publication: Publication, repository: str) -> PublicationRow:
    """The row of a publication in HOST/REPO."""
    sqsh, revoked = publication.sqsh, publication.revoked
    own = {
        "repository": repository,
        "sqsh_digest": sqsh.digest if sqsh else None,
        "sqsh_size_bytes": sqsh.size_bytes if sqsh else 0,
        "sqsh_place": sqsh.place if sqsh else "",
        "revoked_at": revoked.at if revoked else None,
        "revoked_reason": revoked.reason if revoked else "",
    }
    return PublicationRow(**_named_alike(PublicationRow, publication) | own)


def moved(before: LockRow | None, after: LockRow) -> tuple[Moved, ...]:
    """The packages that two locks have in different versions; a component from git is known by its commit."""
    if before is None or before.digest == after.digest:
        return ()
    old, new = _versions(before), _versions(after)
    return tuple(
        Moved(package=name, before=old.get(name), after=new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def _versions(row: LockRow) -> dict[str, str]:
    commits = {name: f"{part.version} {part.commit[:12]}" for name, part in row.components.items() if part.commit}
    return {**row.packages, **commits}
