"""The image's SBOM as SPDX 2.3, which today's tools read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from envbuild import __version__
from envbuild.image.record import ImageRecord
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.lock.record.content import serial_number, timestamp

MEDIA_TYPE = "application/spdx+json"
DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE = "SPDXRef-Image"
NOTHING = "NOASSERTION"


def spdx(record: ImageRecord, packages: Sequence[ListedPackage]) -> dict[str, Any]:
    ids = _ids(packages)
    return {
        "spdxVersion": "SPDX-2.3",
        # The one value that is allowed; it is about the document, not the software (SPDX 2.3, section 6.2).
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": record.report_name,
        # SPDX 2.3, section 6.5: unique for each document, and no address that has to exist.
        "documentNamespace": serial_number(record.oci_digest, "spdx-2.3"),
        "creationInfo": {"created": timestamp(record.source_date_epoch), "creators": [f"Tool: envbuild-{__version__}"]},
        "packages": [
            {
                "SPDXID": IMAGE,
                "name": record.report_name,
                "versionInfo": record.oci_digest,
                "primaryPackagePurpose": "CONTAINER",
                "checksums": [{"algorithm": "SHA256", "checksumValue": record.oci_digest.removeprefix("sha256:")}],
                **_not_asserted(),
            },
            *[_package(package, ids[package.purl]) for package in packages],
        ],
        "relationships": [
            _relation(DOCUMENT, "DESCRIBES", IMAGE),
            *[_relation(IMAGE, "CONTAINS", ids[package.purl]) for package in packages],
        ],
    }


def _ids(packages: Sequence[ListedPackage]) -> dict[str, str]:
    """SPDX identifiers, which have letters, digits, dots and dashes alone."""
    ids: dict[str, str] = {}
    taken: set[str] = set()
    for package in packages:
        # SPDX 2.3, section 7.2.
        plain = "SPDXRef-Package-" + re.sub(r"[^A-Za-z0-9.]+", "-", f"{package.kind}-{package.name}-{package.version}")
        name, count = plain, 1
        while name in taken:
            count += 1
            name = f"{plain}-{count}"
        taken.add(name)
        ids[package.purl] = name
    return ids


def _not_asserted() -> dict[str, Any]:
    return {
        "downloadLocation": NOTHING,
        # It is true by default, and then a code over all files of the package is mandatory (SPDX 2.3, 7.8 and 7.9).
        "filesAnalyzed": False,
        "licenseConcluded": NOTHING,
        "licenseDeclared": NOTHING,
        "copyrightText": NOTHING,
    }


def _package(listed: ListedPackage, name: str) -> dict[str, Any]:
    package: dict[str, Any] = {
        "SPDXID": name,
        "name": listed.name,
        "versionInfo": listed.version,
        **_not_asserted(),
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": listed.purl}
        ],
    }
    if listed.commit:
        package["downloadLocation"] = f"git+{listed.repository}@{listed.commit}"
    if len(listed.hashes) == 1:
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": listed.hashes[0].removeprefix("sha256:")}]
    elif listed.hashes:
        # SPDX has no field for alternatives.
        package["comment"] = f"One of the files {', '.join(listed.hashes)}"
    # SPDX 2.3, section 10.1: a LicenseRef needs the licence's text in the document, which packages seldom bring.
    if listed.licence and "LicenseRef-" not in listed.licence:
        package["licenseDeclared"] = listed.licence
    elif text := ", ".join(filter(None, [listed.licence, *listed.licence_names])):
        package["licenseComments"] = f"The package says: {text}"
    return package


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
