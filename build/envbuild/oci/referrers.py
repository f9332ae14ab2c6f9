"""Attaches artifacts to a manifest on a registry, and lists those that are attached.

Registries with the referrers API do so by themselves. For the others the client keeps an index under a tag
(OCI distribution-spec 1.1, "Referrers Tag Schema"); retention rules of such registries must spare these tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json
from envbuild.core.errors import NetworkError
from envbuild.oci.artifact import artifact_entry
from envbuild.oci.models import INDEX_TYPES, MANIFEST_TYPE, Index, not_of_envbuild, read
from envbuild.oci.models import Descriptor as Referrer
from envbuild.oci.push import (
    CONFLICT,
    NOT_THERE,
    RegistryManifest,
    digest_of_tag,
    if_unchanged,
    put_manifest,
    read_manifest,
)
from envbuild.store.registry import Answer, Registry
from envbuild.store.tags import all_pages, next_query

INDEX_TYPE = INDEX_TYPES[0]
# Whoever writes a tag at the same moment does so once or twice; a hundred times is a registry that keeps nothing.
MOST_WRITES = 20
# How registries without the API answer; 404 is what the specification has.
NO_API = (400, 403, 404, 405, 501)


def tag_of(digest: str) -> str:
    """The tag of the index of a manifest's artifacts."""
    return digest.replace(":", "-")


def has_api(registry: Registry, digest: str) -> bool:
    """Whether a registry has the referrers API; ``digest`` is any, there or not."""
    return _first_page(registry, digest) is not None


def _first_page(registry: Registry, digest: str) -> Answer | None:
    """What the referrers API answers; None where the registry has none."""
    answer = registry.ask("GET", f"referrers/{digest}", accept=(200, *NO_API), headers={"Accept": INDEX_TYPE})
    # Some answer every address with a page: an index says that it is one.
    is_index = answer.status == 200 and answer.headers.get("Content-Type", "").partition(";")[0] == INDEX_TYPE
    return answer if is_index else None


def list_referrers(registry: Registry, digest: str) -> tuple[Referrer, ...]:
    """The artifacts that refer to a manifest.

    Raises:
        NetworkError: the registry cannot be reached, or refuses.
        CheckRefusedError: its answer is no index.
    """
    answer = _first_page(registry, digest)
    if answer is None:
        index = read_manifest(registry, tag_of(digest))
        return _entries(registry, index.content) if index else ()

    def next_page(headers: Mapping[str, str]) -> str:
        query = next_query(headers)
        return f"referrers/{digest}?{query}" if query else ""

    pages = all_pages(registry, answer, "its list of artifacts", next_page, Accept=INDEX_TYPE)
    return tuple(entry for page in pages for entry in _entries(registry, page.body))


def attach(registry: Registry, manifests: Mapping[str, Sequence[bytes]], subject: str) -> int:
    """Push artifacts that refer to a manifest; their blobs must be there. Returns the bytes that were sent.

    Args:
        manifests: by their artifact type.
        subject: the digest of what they refer to.

    Raises:
        NetworkError: the registry cannot be reached, or refuses.
    """
    sent, unlisted = 0, []
    for artifact_type, contents in manifests.items():
        for content in contents:
            manifest = RegistryManifest(content=content, media_type=MANIFEST_TYPE)
            answer = put_manifest(registry, manifest.digest, manifest)
            sent += len(content)
            # distribution-spec 1.1, "Pushing Manifests with Subject": a registry with the API says so here.
            if answer.headers.get("OCI-Subject") != subject:
                unlisted.append(artifact_entry(content, artifact_type, {}))
    return sent + (_add_to_tag(registry, tag_of(subject), unlisted) if unlisted else 0)


def _add_to_tag(registry: Registry, tag: str, entries: Sequence[dict[str, Json]]) -> int:
    """Add entries to the index of a tag, and look again until they are there: others may write it meanwhile."""
    sent, gone = 0, set[str]()
    for _ in range(MOST_WRITES):
        before = read_manifest(registry, tag)
        # Whatever else somebody has put there is written over.
        document = jsonread.foreign(before.content) if before else {}
        there = document.get("manifests") if isinstance(document, dict) else None
        entries_there: list[Json] = there if isinstance(there, list) else []
        listed = [entry for entry in entries_there if isinstance(entry, dict) and entry.get("digest") not in gone]
        known = {entry.get("digest") for entry in listed}
        missing = [entry for entry in entries if entry["digest"] not in known]
        if not missing:
            return sent
        index = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*listed, *missing]})
        manifest = RegistryManifest(content=index, media_type=INDEX_TYPE)
        accept = (201, *CONFLICT) if gone else (201, *CONFLICT, *NOT_THERE)
        answer = put_manifest(registry, tag, manifest, accept=accept, headers=if_unchanged(before))
        sent += len(index)
        if answer.status in NOT_THERE:
            # What a retention rule took is listed no more, or the registry would never take this index again. Where
            # all is there, the next refusal is the registry's last word.
            digests = [str(descriptor.get("digest")) for descriptor in (*listed, *missing)]
            gone = {digest for digest in digests if digest_of_tag(registry, digest) is None} or {""}
    raise not_kept(registry, tag)


def not_kept(registry: Registry, tag: str) -> NetworkError:
    """The error for a tag that has not what was written to it, however often."""
    return NetworkError(
        f"{registry.error.name} does not keep the tag {tag}",
        why=f"It was written {MOST_WRITES} times, and each time what was written was not there afterwards.",
        fix="Another program writes it, or the registry's tags cannot be changed: allow changes of this tag there.",
    )


def _entries(registry: Registry, content: bytes) -> tuple[Referrer, ...]:
    return read(content, Index, f"a list of artifacts of {registry.address}", not_of_envbuild).manifests
