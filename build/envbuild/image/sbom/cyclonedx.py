"""The image's SBOM as CycloneDX 1.6. It has the time and the serial number that follow from the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envbuild import __version__
from envbuild.image.record import ImageRecord
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.lock.record.content import distribution, serial_number, timestamp

MEDIA_TYPE = "application/vnd.cyclonedx+json"


def cyclonedx(record: ImageRecord, packages: Sequence[ListedPackage]) -> dict[str, Any]:
    # purl-spec, type oci: the version is the digest, with its colon percent-encoded.
    root = f"pkg:oci/{record.report_name}@{record.oci_digest.replace(':', '%3A')}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # CycloneDX wants a UUID of each document; one derived from the image is the same for the same image.
        "serialNumber": serial_number(record.oci_digest, "cyclonedx-1.6"),
        "version": 1,
        "metadata": {
            "timestamp": timestamp(record.source_date_epoch),
            "tools": {"components": [{"type": "application", "name": "envbuild", "version": __version__}]},
            "component": {
                "type": "container",
                "bom-ref": root,
                "name": record.report_name,
                "version": record.oci_digest,
                "purl": root,
                "hashes": [{"alg": "SHA-256", "content": record.oci_digest.removeprefix("sha256:")}],
                "properties": [
                    {"name": "envbuild:stack", "value": record.stack},
                    {"name": "envbuild:base", "value": record.base},
                    {"name": "envbuild:base-digest", "value": record.base_digest},
                    {"name": "envbuild:hardware", "value": record.hardware},
                    {"name": "envbuild:lock", "value": record.lock_digest},
                ],
            },
        },
        "components": [_component(package) for package in packages],
        "dependencies": [{"ref": root, "dependsOn": sorted(package.purl for package in packages)}],
    }


def _component(package: ListedPackage) -> dict[str, Any]:
    files = [distribution(package.name, package.version, digest) for digest in package.hashes]
    if package.commit:
        files.append({"type": "vcs", "url": package.repository, "comment": f"commit {package.commit}"})
    properties = [("envbuild:component", "true")] if package.component else []
    properties += [("envbuild:wheel", package.wheel), ("envbuild:sdist", package.sdist)]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": _licences(package),
        # The very file, where only one can be it.
        "hashes": [{"alg": "SHA-256", "content": package.hashes[0].removeprefix("sha256:")}]
        if len(package.hashes) == 1
        else [],
        "externalReferences": files,
        "properties": [{"name": name, "value": value} for name, value in properties if value],
    }
    return {key: value for key, value in component.items() if value}


def _licences(package: ListedPackage) -> list[dict[str, Any]]:
    if package.licence:
        return [{"expression": package.licence}]
    return [{"license": {"name": name}} for name in package.licence_names]
