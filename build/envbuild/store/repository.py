"""A remote store in an OCI registry: an entry is a tagged manifest, its document the config, its files the layers.

`oras pull` gets the files of an entry, too. Registries have no conditional put of a tag: it is looked at before and
after, and where two writers come within that moment the later one's stays, and the earlier one notices.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, is_digest, sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.store.address import Address
from envbuild.store.backend import Cell, EntryFiles, EntryRef, StoredObject
from envbuild.store.conditional import change_settled
from envbuild.store.document import MOST_BYTES, refused
from envbuild.store.registry import Answer, Registry
from envbuild.store.registry_errors import STORE, Wording
from envbuild.store.tags import list_tags
from envbuild.store.upload import has_blob, upload_blob, upload_bytes

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
DOCUMENT_TYPE = "application/vnd.envbuild.entry.v1+json"
FILE_TYPE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"
# After its own write a writer waits this long before it looks whose manifest the tag has.
SETTLE_SECONDS = 0.5
# A registry that keeps tags as they are answers one of these to a second manifest.
CONFLICT = (409, 412)
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
# Tags have at most 128 characters of [a-zA-Z0-9._-] (OCI distribution-spec, "Pulling manifests"), of which a key takes
# 64.
_INDEX_TAG = re.compile(r"([^.-]+)\.(.+)\.([0-9a-f]{64})")


class OciRepository:
    """Entries as tags ``KIND-KEY``, the index as tags ``KIND.PATH.KEY``, in one repository."""

    def __init__(
        self, address: Address, ca_bundle: Path | None, environ: Mapping[str, str], wording: Wording = STORE
    ) -> None:
        self._address = address
        self._registry = Registry(address, ca_bundle, environ, wording)

    def read(self, kind: str, key: str) -> bytes | None:
        manifest = _manifest(self._registry, _tag(kind, key))
        if manifest is None:
            return None
        try:
            config = jsonread.foreign(manifest)["config"]
            digest, size = str(config["digest"]), int(config["size"])
            if size > MOST_BYTES or not is_digest(digest):
                raise ValueError("it names no document")
        except (ValueError, KeyError, TypeError) as error:
            raise refused(kind, key, str(self._address), "Its manifest was not written by envbuild.") from error
        content = self._registry.read(f"blobs/{digest}", size)
        if content is None or sha256_bytes(content) != digest:
            why = "Its document has another digest than its manifest states."
            raise refused(kind, key, str(self._address), why)
        return content

    def create(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> bool:
        manifest = self._prepared(document, files)
        # The index first, as in Objects.create: what it lists may be missing, but no entry is missing from it.
        _put(self._registry, _index_tag(kind, key, index_path), manifest, accept=(201, *CONFLICT))
        tag = _tag(kind, key)
        if _manifest(self._registry, tag) is not None:
            return False
        # The header is not in the spec; registries that do not know it ignore it.
        answer = _put(self._registry, tag, manifest, accept=(201, *CONFLICT), headers={"If-None-Match": "*"})
        if answer.status in CONFLICT:
            return False
        time.sleep(SETTLE_SECONDS)
        return _manifest(self._registry, tag) == manifest

    def replace(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> None:
        manifest = self._prepared(document, files)
        _put(self._registry, _index_tag(kind, key, index_path), manifest, accept=(201, *CONFLICT))
        _put(self._registry, _tag(kind, key), manifest)

    def keys(self, kind: str) -> list[str]:
        beginning = f"{kind}-"
        tags = [tag.removeprefix(beginning) for tag in list_tags(self._registry) if tag.startswith(beginning)]
        return [f"sha256:{name}" for name in tags if re.fullmatch(r"[0-9a-f]{64}", name)]

    def list_index(self, kind: str, index_path: tuple[str, ...]) -> list[EntryRef]:
        entries = []
        for match in map(_INDEX_TAG.fullmatch, list_tags(self._registry)):
            if match is not None and match[1] == kind:
                place = tuple(match[2].split("."))
                entries += [EntryRef(f"sha256:{match[3]}", place)] if place[: len(index_path)] == index_path else []
        return entries

    def has(self, digest: str, size_bytes: int) -> bool:
        return has_blob(self._registry, digest, size_bytes)

    def upload(self, file: Path, digest: str, size_bytes: int) -> None:
        upload_blob(self._registry, file, digest, size_bytes)

    def download(self, digest: str, size_bytes: int, to: Path) -> bool:
        return self._registry.download(f"blobs/{digest}", size_bytes, to)

    def cell(self, name: str) -> Cell:
        return TagCell(self._registry, f"cell-{name}")

    def _prepared(self, document: bytes, files: EntryFiles) -> bytes:
        """The manifest, with its config in place."""
        digest = upload_bytes(self._registry, document)
        layers: list[Json] = [
            {"mediaType": FILE_TYPE, "digest": blob.digest, "size": blob.size_bytes, "annotations": {TITLE: blob.name}}
            for blob in files
        ]
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": DOCUMENT_TYPE,
                "config": {"mediaType": DOCUMENT_TYPE, "digest": digest, "size": len(document)},
                "layers": layers,
            }
        )


def _manifest(registry: Registry, tag: str) -> bytes | None:
    answer = registry.ask("GET", f"manifests/{tag}", accept=(200, 404), headers={"Accept": MANIFEST_TYPE})
    return answer.body if answer.status == 200 else None


def _put(
    registry: Registry,
    tag: str,
    manifest: bytes,
    *,
    accept: tuple[int, ...] = (201,),
    headers: Mapping[str, str] = NO_HEADERS,
) -> Answer:
    sent = {"Content-Type": MANIFEST_TYPE, **headers}
    return registry.ask("PUT", f"manifests/{tag}", accept=accept, headers=sent, body=manifest)


def _tag(kind: str, key: str) -> str:
    return f"{kind}-{key.removeprefix('sha256:')}"


def _index_tag(kind: str, key: str, index_path: tuple[str, ...]) -> str:
    return ".".join([kind, *index_path, key.removeprefix("sha256:")])


CELL_TYPE = "application/vnd.envbuild.cell.v1+json"
# OCI image-spec 1.1, "Guidance for an Empty Descriptor".
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
CONTENT, WRITTEN = "org.envbuild.cell.content", "org.envbuild.cell.written"


@dataclass(frozen=True)
class TagCell:
    """A cell in a registry, which writes tags without conditions: a manifest that holds the content."""

    registry: Registry
    tag: str

    @property
    def removal(self) -> str:
        address = self.registry.address
        return f"remove its tag (skopeo delete docker://{address.host}/{address.path}:{self.tag})"

    def read(self) -> StoredObject | None:
        raw = self._manifest()
        if raw is None:
            return None
        version = {"digest": sha256_bytes(raw)}
        try:
            notes = jsonread.foreign(raw)["annotations"]
            content = base64.b64decode(notes[CONTENT], validate=True)
            return StoredObject(content, version, datetime.fromisoformat(notes[WRITTEN]).astimezone(timezone.utc))
        except (ValueError, KeyError, TypeError, AttributeError):
            # Somebody else's manifest: no content of ours, and replaced as such.
            return StoredObject(b"", version, datetime.fromtimestamp(0, timezone.utc))

    def create(self, content: bytes) -> bool:
        return self._write(content, None)

    def replace(self, content: bytes, of: StoredObject) -> bool:
        there = self._manifest()
        if there is None or sha256_bytes(there) != of.version["digest"]:
            return False
        return self._write(content, there)

    def now(self) -> datetime:
        answer = self.registry.ask("HEAD", f"manifests/{self.tag}", accept=(200, 404))
        try:
            return parsedate_to_datetime(answer.headers["Date"]).astimezone(timezone.utc)
        except (KeyError, ValueError, TypeError) as error:
            raise NetworkError(
                f"{self.registry.error.name} tells no time",
                why="Its answers have no Date (RFC 9110, 6.6.1), by which leases end.",
                fix="Name a bucket or a directory of a shared file system instead.",
            ) from error

    def _write(self, content: bytes, before: bytes | None) -> bool:
        upload_bytes(self.registry, EMPTY)
        manifest = canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": CELL_TYPE,
                "config": _EMPTY_DESCRIPTOR,
                "layers": [_EMPTY_DESCRIPTOR],
                "annotations": {
                    CONTENT: base64.b64encode(content).decode(),
                    WRITTEN: self.now().isoformat(),
                },
            }
        )
        return change_settled(self._manifest, lambda: _put(self.registry, self.tag, manifest), before, manifest)

    def _manifest(self) -> bytes | None:
        return _manifest(self.registry, self.tag)


_EMPTY_DESCRIPTOR: dict[str, Json] = {"mediaType": EMPTY_TYPE, "digest": sha256_bytes(EMPTY), "size": len(EMPTY)}
