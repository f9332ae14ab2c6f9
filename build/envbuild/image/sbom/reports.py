"""Reports as artifacts that refer to the image (OCI image-spec 1.1): found by the digest of its manifest.

They are listed in the layout's index without a tag; the image's own manifest is not touched. A registry without the
referrers API is given their index under the tag ``sha256-<digest>`` when they are pushed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.core.digests import Json, canonical_json, sha256_bytes
from envbuild.core.files import link_or_copy, write_atomic
from envbuild.image.record import CYCLONEDX_FILE, PROVENANCE_FILE, SPDX_FILE, ImageRecord, ReferrerRecord
from envbuild.image.sbom import cyclonedx, provenance, spdx
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.oci.artifact import CREATED, EMPTY, TITLE, artifact_entry, artifact_manifest, file_descriptor
from envbuild.oci.files import blob_path
from envbuild.oci.models import INDEX_FILE

# Raised when the reports of the same image would come out differently.
FORMAT = 1


def reports_of(record: ImageRecord, packages: Sequence[ListedPackage]) -> tuple[Attachment, ...]:
    return (
        _report(CYCLONEDX_FILE, cyclonedx.MEDIA_TYPE, cyclonedx.cyclonedx(record, packages)),
        _report(SPDX_FILE, spdx.MEDIA_TYPE, spdx.spdx(record, packages)),
        _report(PROVENANCE_FILE, provenance.MEDIA_TYPE, provenance.provenance(record, packages)),
    )


def _report(file: str, media_type: str, document: dict[str, Any]) -> Attachment:
    content = (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return Attachment(file=file, media_type=media_type, content=content)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A file about an image."""

    file: str
    media_type: str
    content: bytes


def attach(layout: Path, folder: Path, reports: Sequence[Attachment], created: str) -> tuple[ReferrerRecord, ...]:
    """Write reports into ``folder``, and attach them to the only image of an OCI layout.

    Args:
        created: the time of their manifests, which is the image's own.
    """
    index = json.loads((layout / INDEX_FILE).read_bytes())
    [image] = index["manifests"]
    # Without the annotations: the tag of the place is in them, and is no part of the image.
    subject: dict[str, Json] = {key: image[key] for key in ("mediaType", "digest", "size")}
    _blob(layout, EMPTY)
    records = []
    for report in reports:
        write_atomic(folder / report.file, report.content)
        digest = sha256_bytes(report.content)
        link_or_copy(folder / report.file, layout / blob_path(digest))
        described = file_descriptor(report.media_type, digest, len(report.content), report.file)
        annotations = {CREATED: created, TITLE: report.file}
        manifest = artifact_manifest(report.media_type, described, subject, annotations)
        _blob(layout, manifest)
        index["manifests"].append(artifact_entry(manifest, report.media_type, annotations))
        records.append(
            ReferrerRecord(
                file=report.file,
                artifact_type=report.media_type,
                manifest_digest=sha256_bytes(manifest),
                digest=digest,
                size_bytes=len(report.content),
            )
        )
    write_atomic(layout / INDEX_FILE, canonical_json(index))
    return tuple(records)


def _blob(layout: Path, content: bytes) -> None:
    write_atomic(layout / blob_path(sha256_bytes(content)), content)
