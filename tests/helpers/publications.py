"""Publications made by hand."""

from __future__ import annotations

from envbuild.core.digests import sha256_bytes
from envbuild.publish.models import Publication, PublishedSqsh

MOMENT = "2026-11-20T06:00:00Z"


def make_publication(**changes: object) -> Publication:
    """A certified publication of stack mcore for the CPU; ``changes`` are its fields."""
    fields: dict = {
        "stack": "mcore",
        "base": "debian12",
        "target": "cpu",
        "lock_name": "mcore",
        "lock_digest": sha256_bytes(b"lock"),
        "oci_digest": sha256_bytes(b"manifest"),
        "size_bytes": 1000,
        "sqsh": PublishedSqsh(digest=sha256_bytes(b"sqsh"), size_bytes=900),
        "certificate_digest": sha256_bytes(b"certificate"),
        "keyid": "ab" * 32,
        "certified_at": MOMENT,
        "measured_at": MOMENT,
        "published_at": MOMENT,
        "tag": "mcore-debian12-0123456789ab-cpu",
        "moving_tag": "mcore-debian12-cpu",
        "base_digest": sha256_bytes(b"base"),
        "base_rebuilt": False,
        "envbuild": "0",
    }
    return Publication(**(fields | changes))
