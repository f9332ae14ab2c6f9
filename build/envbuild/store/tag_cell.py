"""A cell in an OCI registry, which writes tags without conditions: a manifest that holds the content."""

from __future__ import annotations

import base64
import tempfile
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
from envbuild.store.settled import change_settled
from envbuild.store.upload import has_blob, upload_blob

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CELL_TYPE = "application/vnd.envbuild.cell.v1+json"
# OCI image-spec 1.1, "Guidance for an Empty Descriptor".
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
CONTENT, WRITTEN = "org.envbuild.cell.content", "org.envbuild.cell.written"


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
        sent = {"Content-Type": MANIFEST_TYPE}

        def put() -> None:
            self.registry.ask("PUT", f"manifests/{self.tag}", accept=(201,), headers=sent, body=manifest)

        return change_settled(self._manifest, put, before, manifest)

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
