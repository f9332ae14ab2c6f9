"""How the image was built, as an in-toto statement with SLSA's provenance (v1). It is not signed.

It is a function of the inputs: no host, no path, no time is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envbuild import __version__
from envbuild.core.digests import Json
from envbuild.image.record import ImageRecord
from envbuild.image.sbom.inventory import ListedPackage

MEDIA_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:envbuild:native-image:1"
BUILDER = "urn:envbuild:native-builder"


def provenance(record: ImageRecord, packages: Sequence[ListedPackage]) -> dict[str, Any]:
    tools = {"uv": record.uv, "gzip": record.gzip, "base": record.base_made_by}
    if record.sqsh:
        tools["sqsh"] = f"{record.sqsh.packed_by}, {record.sqsh.compression}"
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": record.report_name, "digest": _digest(record.oci_digest)},
            *([{"name": f"{record.report_name}.sqsh", "digest": _digest(record.sqsh.digest)}] if record.sqsh else []),
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "stack": record.stack,
                    "base": record.base,
                    "hardware": record.hardware,
                    "lock": record.lock_digest,
                },
                "internalParameters": {
                    "sourceDateEpoch": record.source_date_epoch,
                    "tools": tools,
                },
                "resolvedDependencies": [
                    {"name": f"base {record.base}", "digest": _digest(record.base_digest)},
                    {"name": f"lock {record.stack}", "digest": _digest(record.lock_digest)},
                    *[_material(package) for package in packages],
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"envbuild": __version__}},
                # The image's key, and not a random one: the statement is the same for the same inputs.
                "metadata": {"invocationId": record.key},
            },
        },
    }


def _material(package: ListedPackage) -> dict[str, Json]:
    """A package as a resource: by its commit, by the wheel that was installed, or by the file that the lock names."""
    material: dict[str, Json] = {"name": package.name, "uri": package.purl}
    annotations: dict[str, Json] = {}
    if package.commit:
        # in-toto's DigestSet has the name for it (in-toto attestation, "DigestSet").
        material["digest"] = {"gitCommit": package.commit}
    elif len(package.hashes) == 1:
        material["digest"] = _digest(package.hashes[0])
    elif package.hashes:
        # The lock names every wheel of a release; which one was installed here is not recorded.
        annotations["oneOf"] = list(package.hashes)
    if package.wheel:
        annotations |= {"wheel": package.wheel, "wheelDigest": package.hashes[0]}
        annotations |= {"sdist": package.sdist} if package.sdist else {}
    return {**material, **({"annotations": annotations} if annotations else {})}


def _digest(digest: str) -> dict[str, Json]:
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}
