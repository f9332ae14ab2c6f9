"""How the image was built, as an in-toto statement with SLSA's provenance (v1). Without a signature: DSSE comes later.

It is a function of the inputs: no host, no path, no time is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbuild import __version__
from envbuild.core.digests import Json
from envbuild.image.sbom.inventory import ListedPackage
from envbuild.image.sbom.subject import ImageSubject

MEDIA_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:envbuild:native-image:1"
BUILDER = "urn:envbuild:native-builder"


def provenance(subject: ImageSubject, key: str, tools: Mapping[str, str]) -> dict[str, Any]:
    """The statement.

    Args:
        key: the image's key in the store: the digest of everything that decides it.
        tools: versions of the programs that made it.
    """
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": subject.name, "digest": _digest(subject.digest)},
            *([{"name": f"{subject.name}.sqsh", "digest": _digest(subject.sqsh)}] if subject.sqsh else []),
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "stack": subject.stack,
                    "base": subject.base,
                    "hardware": subject.hardware,
                    "lock": subject.lock_digest,
                },
                "internalParameters": {"sourceDateEpoch": subject.epoch, "tools": dict(sorted(tools.items()))},
                "resolvedDependencies": [
                    {"name": f"base {subject.base}", "digest": _digest(subject.base_digest)},
                    {"name": f"lock {subject.stack}", "digest": _digest(subject.lock_digest)},
                    *[_material(item) for item in subject.packages],
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"envbuild": __version__}},
                "metadata": {"invocationId": key},
            },
        },
    }


def _material(item: ListedPackage) -> dict[str, Json]:
    """A package as a resource: by its commit, by the wheel that was installed, or by the file that the lock names."""
    found: dict[str, Json] = {"name": item.name, "uri": item.purl}
    annotations: dict[str, Json] = {}
    if item.commit:
        found["digest"] = {"gitCommit": item.commit}
    elif len(item.hashes) == 1:
        found["digest"] = _digest(item.hashes[0])
    elif item.hashes:
        annotations["oneOf"] = list(item.hashes)
    if item.wheel:
        annotations |= {"wheel": item.wheel, "wheelDigest": item.hashes[0]}
        annotations |= {"sdist": item.sdist} if item.sdist else {}
    return {**found, **({"annotations": annotations} if annotations else {})}


def _digest(digest: str) -> dict[str, Json]:
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}
