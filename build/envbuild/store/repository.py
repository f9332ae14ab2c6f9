"""A remote store in an OCI registry: an entry is a tagged manifest, its document the config, its files the layers.

`oras pull` gets the files of an entry, too. Registries have no conditional put of a tag: it is looked at before and
after, and where two writers come within that moment the later one's stays, and the earlier one notices.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, is_digest, sha256_bytes
from envbuild.core.files import machine_errors
from envbuild.store.address import Address
from envbuild.store.backend import Cell, EntryFiles, EntryRef
from envbuild.store.document import MOST_BYTES, refused
from envbuild.store.registry import Answer, Registry
from envbuild.store.registry_errors import STORE, Wording
from envbuild.store.tag_cell import TagCell
from envbuild.store.tags import list_tags
from envbuild.store.upload import has_blob, upload_blob

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
DOCUMENT_TYPE = "application/vnd.envbuild.entry.v1+json"
FILE_TYPE = "application/octet-stream"
TITLE = "org.opencontainers.image.title"
# After its own write a writer waits this long before it looks whose manifest the tag has.
SETTLE_SECONDS = 0.5
# A registry that keeps tags as they are answers one of these to a second manifest.
CONFLICT = (409, 412)
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
        manifest = self._manifest(_tag(kind, key))
        if manifest is None:
            return None
        try:
            config = jsonread.foreign(manifest.body)["config"]
            digest, size = str(config["digest"]), int(config["size"])
            if size > MOST_BYTES or not is_digest(digest):
                raise ValueError("it names no document")
        except (ValueError, KeyError, TypeError) as error:
            raise refused(kind, key, str(self._address), "Its manifest was not written by envbuild.") from error
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            document = Path(folder) / "document"
            with machine_errors(document):
                exists = self._registry.download(f"blobs/{digest}", size, document)
                content = document.read_bytes()
        if not exists or sha256_bytes(content) != digest:
            why = "Its document has another digest than its manifest states."
            raise refused(kind, key, str(self._address), why)
        return content

    def create(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> bool:
        manifest = self._prepared(document, files)
        # The index first, as in Objects.create: what it lists may be missing, but no entry is missing from it.
        self._put(_index_tag(kind, key, index_path), manifest, accept=(201, *CONFLICT))
        tag = _tag(kind, key)
        if self._manifest(tag) is not None:
            return False
        # The header is not in the spec; registries that do not know it ignore it.
        answer = self._put(tag, manifest, accept=(201, *CONFLICT), headers={"If-None-Match": "*"})
        if answer.status in CONFLICT:
            return False
        time.sleep(SETTLE_SECONDS)
        present = self._manifest(tag)
        return present is not None and present.body == manifest

    def replace(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> None:
        manifest = self._prepared(document, files)
        self._put(_index_tag(kind, key, index_path), manifest, accept=(201, *CONFLICT))
        self._put(_tag(kind, key), manifest, accept=(201,))

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
        digest = sha256_bytes(document)
        if not self.has(digest, len(document)):
            with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
                file = Path(folder) / "document"
                with machine_errors(file):
                    file.write_bytes(document)
                self.upload(file, digest, len(document))
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

    def _manifest(self, tag: str) -> Answer | None:
        answer = self._registry.ask("GET", f"manifests/{tag}", accept=(200, 404), headers={"Accept": MANIFEST_TYPE})
        return answer if answer.status == 200 else None

    def _put(
        self, tag: str, manifest: bytes, *, accept: tuple[int, ...], headers: Mapping[str, str] | None = None
    ) -> Answer:
        sent = {"Content-Type": MANIFEST_TYPE, **(headers or {})}
        return self._registry.ask("PUT", f"manifests/{tag}", accept=accept, headers=sent, body=manifest)


def _tag(kind: str, key: str) -> str:
    return f"{kind}-{key.removeprefix('sha256:')}"


def _index_tag(kind: str, key: str, index_path: tuple[str, ...]) -> str:
    return ".".join([kind, *index_path, key.removeprefix("sha256:")])
