"""Rows of a ledger, as nights write them."""

from __future__ import annotations

from envbuild.core.digests import digest_of
from envbuild.ledger.models import CertificateRow, ImageRow, LockedPart, LockRow, NightRow, PublicationRow, StepRow

MOMENT = "2026-01-02T03:04:05Z"


def digest(word: object) -> str:
    return digest_of({"word": str(word)})


def lock_row(word: object = "a", **fields: object) -> LockRow:
    part = LockedPart(version="1.0", asked="main", commit="c" * 40, follows=True)
    values = {
        "stack": "mcore",
        "digest": digest(word),
        "name": "mcore",
        "base": "debian12",
        "components": {"megatron-core": part},
        "packages": {"megatron-core": "1.0"},
        "seen_at": MOMENT,
    }
    return LockRow.model_validate(values | fields)


def image_row(word: object = "a", **fields: object) -> ImageRow:
    values = {
        "stack": "mcore",
        "oci_digest": digest(word),
        "lock_digest": digest("a"),
        "base": "debian12",
        "target": "cpu",
        "size_bytes": 1000,
        "built_at": MOMENT,
    }
    return ImageRow.model_validate(values | fields)


def publication_row(word: object = "a", **fields: object) -> PublicationRow:
    values = {
        "stack": "mcore",
        "repository": "registry.example/team/envs",
        "tag": f"mcore-{digest(word)[7:19]}-cpu",
        "moving_tag": "mcore-cpu",
        "base": "debian12",
        "target": "cpu",
        "lock_name": "mcore",
        "lock_digest": digest(f"lock {word}"),
        "oci_digest": digest(word),
        "size_bytes": 1000,
        "certificate_digest": digest(f"certificate {word}"),
        "keyid": "k",
        "certified_at": MOMENT,
        "measured_at": MOMENT,
        "published_at": MOMENT,
    }
    return PublicationRow.model_validate(values | fields)


def certificate_row(**fields: object) -> CertificateRow:
    values = {
        "stack": "mcore",
        "digest": digest("certificate a"),
        "certificate_key": digest("key a"),
        "lock_digest": digest("a"),
        "base": "debian12",
        "target": "cpu",
        "keyid": "k",
        "matrix": "certify-quick",
        "matrix_digest": digest("matrix"),
        "matrix_is_shipped": True,
        "whole_matrix": True,
        "cases": 3,
        "measured_at": MOMENT,
        "issued_at": MOMENT,
    }
    return CertificateRow.model_validate(values | fields)


def night_row(name: str = "n1", **fields: object) -> NightRow:
    return NightRow.model_validate({"stack": "mcore", "id": name, "targets": ["cpu"], "started_at": MOMENT} | fields)


def step_row(name: str = "image", **fields: object) -> StepRow:
    values = {
        "stack": "mcore",
        "night": "n1",
        "target": "cpu",
        "name": name,
        "state": "done",
        "started_at": MOMENT,
    }
    return StepRow.model_validate(values | fields)
