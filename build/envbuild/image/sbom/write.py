"""The reports of an image, as bytes that are the same for the same image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envbuild.image.record import CYCLONEDX_FILE, PROVENANCE_FILE, SPDX_FILE, ImageRecord
from envbuild.image.sbom import cyclonedx, provenance, spdx
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.image.sbom.referrers import Attachment

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
