"""The CycloneDX document of a lock: uv's own, without what differs from run to run and from site to site."""

from __future__ import annotations

import json
import urllib.parse
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.lock.content import Content, Package
from envbuild.lock.record import Lock

# The name space of the serial numbers of our documents, made once with uuid4.
_SERIAL_NUMBERS = uuid.UUID("5f0f2c3e-6a5c-4f6e-9a3b-6d0d6a1c7b52")


def settled(text: str, lock: Lock, phases: Sequence[str], wanted: Content) -> dict[str, Any]:
    """The document that uv wrote, made a function of the lock.

    The serial number and the time follow from the lock. A file is named by its name and hash: the address that uv
    writes is that of the index of whoever ran it. What comes from git keeps its repository and commit.
    """
    document: dict[str, Any] = json.loads(text)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(_SERIAL_NUMBERS, ' '.join([lock.digest, *phases]))}"
    metadata = document["metadata"]
    made = datetime.fromtimestamp(lock.source_date_epoch, timezone.utc)
    metadata["timestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
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
            component["externalReferences"] = [_file(component, digest) for digest in sorted(locked.hashes)]
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


def _file(component: dict[str, Any], digest: str) -> dict[str, Any]:
    return {
        "type": "distribution",
        "url": f"{component['name']}-{component['version']}",
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
    }
