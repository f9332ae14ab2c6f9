"""Pushes to a registry: blobs in parallel, those that are there skipped, then manifests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.background import run_in_background
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.oci.models import INDEX_TYPES, MANIFEST_TYPES
from envbuild.store.registry import Answer, Registry
from envbuild.store.upload import has_blob, mount_blob, upload_blob

# How many blobs are sent at once; skopeo and podman have six, docker five.
PARALLEL = 5
ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
# A registry that has conditional requests answers one of these where the tag was changed meanwhile.
CONFLICT = (409, 412)
# How registries refuse a manifest that names what they do not have.
NOT_THERE = (400, 404)
# How often such a manifest is sent again.
TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A blob to push, and the file that has it."""

    digest: str
    size_bytes: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a push did.

    Attributes:
        bytes_sent: of blobs and manifests, those that were sent twice included.
        sent, present, mounted: how many blobs.
    """

    bytes_sent: int = 0
    sent: int = 0
    present: int = 0
    mounted: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            bytes_sent=self.bytes_sent + other.bytes_sent,
            sent=self.sent + other.sent,
            present=self.present + other.present,
            mounted=self.mounted + other.mounted,
        )


@dataclass(frozen=True, kw_only=True)
class RegistryManifest:
    """A manifest or an index as a registry has it."""

    content: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return sha256_bytes(self.content)


def push_blobs(
    registry: Registry, blobs: Sequence[Blob], *, mount_from: Sequence[str] = (), parallel: int = PARALLEL
) -> Sent:
    """Bring blobs into a repository.

    Args:
        mount_from: other repositories of the registry, which are tried before a blob is sent.

    Raises:
        NetworkError: the registry cannot be reached, or refuses one; those that are there stay.
    """
    waiting: queue.SimpleQueue[Blob] = queue.SimpleQueue()
    # The largest first: the last one to begin decides when all are there.
    for blob in sorted({blob.digest: blob for blob in blobs}.values(), key=lambda one: -one.size_bytes):
        waiting.put(blob)
    failed = threading.Event()

    def work() -> Sent:
        done = Sent()
        while not failed.is_set():
            try:
                blob = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                done += _bring(registry, blob, mount_from)
            except BaseException:
                failed.set()
                raise
        return done

    # Daemon threads: Ctrl-C does not wait for a chunk to go out.
    workers = [run_in_background(work) for _ in range(min(parallel, len(blobs)))]
    # All have ended before an error is raised: no worker sends on.
    errors = [error for error in [worker.exception() for worker in workers] if error is not None]
    if errors:
        raise errors[0]
    return sum([worker.result() for worker in workers], Sent())


def _bring(registry: Registry, blob: Blob, mount_from: Sequence[str]) -> Sent:
    if has_blob(registry, blob.digest, blob.size_bytes):
        return Sent(present=1)
    if any(mount_blob(registry, blob.digest, repository) for repository in mount_from):
        return Sent(mounted=1)
    return Sent(sent=1, bytes_sent=upload_blob(registry, blob.file, blob.digest, blob.size_bytes))


def read_manifest(registry: Registry, reference: str) -> RegistryManifest | None:
    """The manifest or index of a tag or digest; None when there is none.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or sends another one than was asked for.
    """
    answer = registry.ask("GET", f"manifests/{reference}", accept=(200, 404), headers={"Accept": ACCEPT})
    if answer.status == 404:
        return None
    manifest = RegistryManifest(
        content=answer.body, media_type=answer.headers.get("Content-Type", "").partition(";")[0]
    )
    # A digest has a colon, and a tag cannot (distribution-spec 1.1, "Pulling manifests").
    stated = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", manifest.digest)
    if stated != manifest.digest:
        raise NetworkError(
            f"{registry.error.name} sent something else than {reference}",
            why=f"It stated {stated}; what came has the digest {manifest.digest}.",
            fix="It was damaged there or on the way: run the same command again, then have its administrators look.",
        )
    return manifest


def digest_of_tag(registry: Registry, tag: str) -> str | None:
    """The digest that a tag names now; None when there is no such tag."""
    answer = registry.ask("HEAD", f"manifests/{tag}", accept=(200, 404), headers={"Accept": ACCEPT})
    if answer.status == 404:
        return None
    # The header is recommended, not required (distribution-spec 1.1, "Pulling manifests").
    if stated := answer.headers.get("Docker-Content-Digest"):
        return str(stated)
    manifest = read_manifest(registry, tag)
    return manifest.digest if manifest else None


def put_manifest(
    registry: Registry,
    reference: str,
    manifest: RegistryManifest,
    *,
    accept: tuple[int, ...] = (201,),
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Write a manifest or an index under a tag or its digest; what it names must be there.

    Raises:
        NetworkError: the registry cannot be reached, or answers something else than ``accept``.
    """
    fields = {"Content-Type": manifest.media_type, **(headers or {})}
    path, allowed, retries = f"manifests/{reference}", {*accept, *NOT_THERE}, registry.retries
    answer = registry.ask("PUT", path, accept=(*allowed,), headers=fields, body=manifest.content)
    # docker's registry on a file system writes its links in place: while another publisher writes the same one, what is
    # there seems not to be (2.8, registry/storage/driver/filesystem).
    for _ in range(TRIES if answer.status not in accept else 0):
        # For the waits alone, which grow: TRIES is over before the policy's own count.
        retries = retries.increment("PUT", path)
        retries.sleep()
        answer = registry.ask("PUT", path, accept=(*allowed,), headers=fields, body=manifest.content)
        if answer.status in accept:
            break
    if answer.status not in accept:
        raise registry.refused(f"PUT {path}", answer.status, answer.body)
    return answer


def if_unchanged(before: RegistryManifest | None) -> dict[str, str]:
    """The condition that a tag names what it named; registries that do not know the header ignore it."""
    return {"If-Match": f'"{before.digest}"'} if before else {"If-None-Match": "*"}
