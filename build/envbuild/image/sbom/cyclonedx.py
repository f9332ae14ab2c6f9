"""The image's SBOM as CycloneDX 1.6. It has the time and the serial number that follow from the image."""

from __future__ import annotations

from typing import Any

from envbuild import __version__
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.image.sbom.subject import ImageSubject
from envbuild.lock.record.cyclonedx import distribution, serial_number, timestamp

MEDIA_TYPE = "application/vnd.cyclonedx+json"


def cyclonedx(subject: ImageSubject) -> dict[str, Any]:
    """The document."""
    root = f"pkg:oci/{subject.name}@{subject.digest.replace(':', '%3A')}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": serial_number(subject.digest, "cyclonedx-1.6"),
        "version": 1,
        "metadata": {
            "timestamp": timestamp(subject.epoch),
            "tools": {"components": [{"type": "application", "name": "envbuild", "version": __version__}]},
            "component": {
                "type": "container",
                "bom-ref": root,
                "name": subject.name,
                "version": subject.digest,
                "purl": root,
                "hashes": [{"alg": "SHA-256", "content": subject.digest.removeprefix("sha256:")}],
                "properties": [
                    {"name": "envbuild:stack", "value": subject.stack},
                    {"name": "envbuild:base", "value": subject.base},
                    {"name": "envbuild:base-digest", "value": subject.base_digest},
                    {"name": "envbuild:hardware", "value": subject.hardware},
                    {"name": "envbuild:lock", "value": subject.lock_digest},
                ],
            },
        },
        "components": [_component(item) for item in subject.packages],
        "dependencies": [{"ref": root, "dependsOn": sorted(item.purl for item in subject.packages)}],
    }


def _component(item: ListedPackage) -> dict[str, Any]:
    files = [distribution(item.name, item.version, digest) for digest in item.hashes]
    if item.commit:
        files.append({"type": "vcs", "url": item.repository, "comment": f"commit {item.commit}"})
    properties = [("envbuild:component", "true")] if item.component else []
    properties += [("envbuild:wheel", item.wheel), ("envbuild:sdist", item.sdist)]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": item.purl,
        "name": item.name,
        "version": item.version,
        "purl": item.purl,
        "licenses": _licences(item),
        # The very file, where only one can be it.
        "hashes": [{"alg": "SHA-256", "content": item.hashes[0].removeprefix("sha256:")}]
        if len(item.hashes) == 1
        else [],
        "externalReferences": files,
        "properties": [{"name": name, "value": value} for name, value in properties if value],
    }
    return {key: value for key, value in component.items() if value}


def _licences(item: ListedPackage) -> list[dict[str, Any]]:
    if item.licence:
        return [{"expression": item.licence}]
    return [{"license": {"name": name}} for name in item.licence_names]
