"""A cell in an OCI registry: a tag whose manifest holds the content, in an annotation.

Registries write tags without conditions, so this is Fischer's mutual exclusion: a writer looks, writes, waits, and
looks again. It is sound where from the first look to the end of the write less time passes than the wait, so a write
that took longer does not count.
"""

from __future__ import annotations

import base64
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.core.files import machine_errors
from envbuild.store.backend import StoredObject
from envbuild.store.registry import Registry
from envbuild.store.upload import has_blob, upload_blob

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CELL_TYPE = "application/vnd.envbuild.cell.v1+json"
# OCI image-spec 1.1, "Guidance for an Empty Descriptor".
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
CONTENT, WRITTEN = "org.envbuild.cell.content", "org.envbuild.cell.written"
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class TagCell:
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
        return self._write(content, of.version["digest"])

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

    def _write(self, content: bytes, before: str | None) -> bool:
        self._put_config()
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
        began = time.monotonic()
        there = self._manifest()
        if (None if there is None else sha256_bytes(there)) != before:
            return False
        sent = {"Content-Type": MANIFEST_TYPE}
        self.registry.ask("PUT", f"manifests/{self.tag}", accept=(201,), headers=sent, body=manifest)
        if time.monotonic() - began > SETTLE_SECONDS:
            return False
        time.sleep(SETTLE_SECONDS)
        return self._manifest() == manifest

    def _put_config(self) -> None:
        digest = sha256_bytes(EMPTY)
        if not has_blob(self.registry, digest, len(EMPTY)):
            with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
                file = Path(folder) / "empty"
                with machine_errors(file):
                    file.write_bytes(EMPTY)
                upload_blob(self.registry, file, digest, len(EMPTY))

    def _manifest(self) -> bytes | None:
        accept = {"Accept": MANIFEST_TYPE}
        answer = self.registry.ask("GET", f"manifests/{self.tag}", accept=(200, 404), headers=accept)
        return answer.body if answer.status == 200 else None


_EMPTY_DESCRIPTOR: dict[str, Json] = {"mediaType": EMPTY_TYPE, "digest": sha256_bytes(EMPTY), "size": len(EMPTY)}
