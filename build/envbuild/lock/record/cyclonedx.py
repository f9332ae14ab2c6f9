"""The CycloneDX document of a lock: uv's own, without what differs from run to run and from site to site."""

from __future__ import annotations

import json
import urllib.parse
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.lock.lockfile import Lock
from envbuild.lock.record.content import Content, Package

# The name space of the serial numbers of our documents, made once with uuid4.
_SERIAL_NUMBERS = uuid.UUID("5f0f2c3e-6a5c-4f6e-9a3b-6d0d6a1c7b52")


def normalized(text: str, lock: Lock, phases: Sequence[str], wanted: Content) -> dict[str, Any]:
    """The document that uv wrote, made a function of the lock.

    The serial number and the time follow from the lock. A file is named by its name and hash: the address that uv
    writes is that of the index of whoever ran it. What comes from git keeps its repository and commit.
    """
    document: dict[str, Any] = json.loads(text)
    document["serialNumber"] = serial_number(lock.digest, *phases)
    metadata = document["metadata"]
    metadata["timestamp"] = timestamp(lock.source_date_epoch)
    metadata["component"] |= {
        "type": "application",
        "name": lock.stack,
        "version": lock.digest,
        "properties": [
            {"name": "envbuild:base", "value": lock.base.name},
            {"name": "envbuild:lock", "value": lock.digest},
            {"name": "envbuild:phases", "value": ",".join(phases)},
        ],
    }
    for component in document["components"]:
        locked = wanted.get(canonicalize_name(component["name"]), Package())
        files = [item for item in component.get("externalReferences", []) if item["type"] == "distribution"]
        if locked.commit is None:
            component["purl"] = component["purl"].partition("?")[0]  # ?repository_url= is where the index is
            for file in files:
                file["url"] = urllib.parse.urlsplit(file["url"]).path.rsplit("/", 1)[-1]
        if not files and locked.hashes:  # uv says nothing of a wheel in a folder
            name, version = component["name"], component["version"]
            component["externalReferences"] = [distribution(name, version, item) for item in sorted(locked.hashes)]
    return document


def content(document: dict[str, Any]) -> dict[str, Package]:
    """The packages of such a document."""
    found: dict[str, Package] = {}
    for component in document["components"]:
        references = component.get("externalReferences", [])
        _, _, origin = urllib.parse.unquote(component.get("purl", "")).partition("vcs_url=")
        found[canonicalize_name(component["name"])] = Package(
            version=component["version"],
            hashes=frozenset(
                f"sha256:{item['content']}"
                for reference in references
                for item in reference.get("hashes", [])
                if item["alg"] == "SHA-256"
            ),
            commit=origin.rpartition("#")[2] or None,
        )
    return found


def render(document: dict[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(document, indent=2) + "\n"


def distribution(name: str, version: str, digest: str) -> dict[str, Any]:
    """The reference to a file of a package: by its hash, since where it lies is the index's own affair."""
    return {
        "type": "distribution",
        "url": f"{name}-{version}",
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
    }


def serial_number(*words: str) -> str:
    """The serial number that follows from what a document is about."""
    return f"urn:uuid:{uuid.uuid5(_SERIAL_NUMBERS, ' '.join(words))}"


def timestamp(epoch: int) -> str:
    """The time of a document: that of what it is about."""
    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
