"""Publishes an image: what is pushed, in which order, so that no tag and no index ever names what is not all there.

Blobs, manifests by their digest, what refers to them, the .sqsh store, the immutable tag, the index, the moving tag.
Every step finds what an earlier run did, so that a killed publication is finished by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.certify.certificate.trust import require_trust
from envbuild.certify.run.integrity import check_unchanged
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, PublicationRefusedError
from envbuild.image.output import PlacedImage
from envbuild.oci.models import DOCKER_MANIFEST_TYPE, MANIFEST_TYPE
from envbuild.oci.push import Blob, RegistryManifest, Sent, digest_of_tag, push_blobs, put_manifest
from envbuild.oci.referrers import attach, list_referrers
from envbuild.oci.write import docker_manifest
from envbuild.publish import artifacts, index
from envbuild.publish.artifacts import Artifact
from envbuild.publish.draft import (
    Destination,
    PublishRequest,
    counts,
    draft_publication,
    find_standing,
    refuse_other_place,
)
from envbuild.publish.gate import Admitted, Rules, admit
from envbuild.publish.models import Publication
from envbuild.publish.moving import move_tag
from envbuild.publish.repository import open_repository
from envbuild.publish.signature import objection_to_key
from envbuild.publish.sqsh_stores import open_sqsh_store
from envbuild.publish.tags import DOCKER_SUFFIX
from envbuild.store.registry import Registry
from envbuild.store.upload import has_blob


@dataclass(frozen=True, kw_only=True)
class Published:
    """A publication, and what this call did.

    Attributes:
        sent: of the image's own blobs and all manifests.
        attached: of what is attached to it: reports, certificate, .sqsh.
        nothing_to_do: it was all there already.
    """

    publication: Publication
    sent: Sent = field(default_factory=Sent)
    attached: Sent = field(default_factory=Sent)
    seconds: float = 0.0
    nothing_to_do: bool = False

    @property
    def bytes_sent(self) -> int:
        """The bytes of everything that was sent to the registry."""
        return self.sent.bytes_sent + self.attached.bytes_sent


def publish(request: PublishRequest, context: Context) -> Published:
    """Publish an image; one that is published already costs a few requests.

    Raises:
        PublicationRefusedError: the gate refuses it, it was revoked, or its tags are somebody else's.
        NetworkError: the registry or the store cannot be reached, or refuses.
        CheckRefusedError: what the registry's index holds is damaged.
    """
    started = time.monotonic()
    reporter = context.reporter
    with reporter.step("check the image and its certificate"):
        _check_lock(request)
        _check_project(request)
        _check_files(request.image, context)
        admitted = None if request.uncertified else _admit(request, context)
    registry = open_repository(request.to, context.site, mount_from=request.mount_from)
    manifest, blobs = artifacts.image_blobs(request.image)
    store = open_sqsh_store(request.sqsh_to, context.site) if request.sqsh_to and request.sqsh else None
    # Also what an index lacks that somebody put back: where its .sqsh is, and that it was revoked.
    listed = index.load_all(registry)
    there = Destination(registry=registry, store=store, publications=listed.publications)
    with context.store.staging("publish") as folder:
        draft = draft_publication(request, there, manifest, admitted, context)
        standing = find_standing(draft, there.publications, context.clock())
        if standing is not None and admitted is not None and not counts(standing, request, context):
            standing = None
        if standing is None:
            _refuse_other_place(draft, there, request, context)
        # A newer certificate than this one stays: only what is no certificate is looked for then.
        newer = standing is not None and standing.certificate_digest != draft.certificate_digest
        attached = _artifacts(request, manifest, None if newer else admitted, draft, folder)
        if (
            standing is not None
            # What was read from the publications' own tags record() writes into the index.
            and not listed.is_lost
            and standing.tag not in listed.unlisted
            and _is_whole(registry, standing, blobs, attached)
            and (store is None or newer or store.has(standing))
        ):
            # Also then: another program may have set the tag back.
            _move(there, standing, context)
            return Published(publication=standing, seconds=time.monotonic() - started, nothing_to_do=True)
        # With its moment, by which moving tags are ordered: what is published again is no newer for that.
        draft = standing or draft
        with reporter.step(f"push {request.image.name} to {registry.address}"):
            sent = push_blobs(registry, [*blobs, artifacts.empty_blob(folder)], mount_from=request.mount_from)
            manifests = _manifests(manifest, draft)
            for each in manifests.values():
                put_manifest(registry, each.digest, each)
                sent += Sent(bytes_sent=len(each.content))
            sent_with_it = _attach(request, registry, attached, draft)
            if store is not None and draft.sqsh is not None and not newer:
                bundle = artifacts.bundle_of(admitted).content if admitted else None
                store.put(request.image.sqsh(), draft, bundle, context.clock())
            _tag(registry, manifests)
            _list(there, draft, len(manifest), listed.unlisted, context)
            _move(there, draft, context)
    return Published(publication=draft, sent=sent, attached=sent_with_it, seconds=time.monotonic() - started)


def _refuse_other_place(draft: Publication, there: Destination, request: PublishRequest, context: Context) -> None:
    listed = next((publication for publication in there.publications if publication.tag == draft.tag), None)
    # Whoever may push can list any place: what a trusted key signed counts.
    if listed is not None and (not draft.certificate_digest or counts(listed, request, context)):
        refuse_other_place(draft, listed, context)


def _list(
    there: Destination, draft: Publication, manifest_bytes: int, unlisted: frozenset[str], context: Context
) -> None:
    """Write the publication into the index."""
    listed = {publication.tag for publication in index.record(there.registry, draft, manifest_bytes)}
    for gone in (publication.tag for publication in there.publications if publication.tag not in listed | unlisted):
        context.reporter.note(f"note: {gone} is listed no more: the registry removed it, or the index was full")


def _is_whole(
    registry: Registry, publication: Publication, blobs: Sequence[Blob], attached: Sequence[Artifact]
) -> bool:
    """Whether a publication of the index is still all there: a retention rule may have removed something."""
    if digest_of_tag(registry, publication.tag) != publication.oci_digest:
        return False
    try:
        listed = {artifact.digest for artifact in list_referrers(registry, publication.oci_digest)}
    except CheckRefusedError:
        return False  # somebody has put something else there
    wanted = [sha256_bytes(artifact.manifest) for artifact in attached]
    # The list under a tag names an artifact also after a retention rule removed it.
    if not all(digest in listed and digest_of_tag(registry, digest) for digest in wanted):
        return False
    own = [*blobs, *(artifact.blob for artifact in attached)]
    # A registry may have lost a blob and not the manifest, and would serve an image that cannot be fetched.
    return all(has_blob(registry, blob.digest, blob.size_bytes) for blob in own)


def _move(there: Destination, publication: Publication, context: Context) -> None:
    """Let the moving tag name what the index says, last of all; in the .sqsh store, too."""
    head = move_tag(there.registry, publication.moving_tag, context.clock())
    if there.store is not None and head is not None and head == publication and head.sqsh is not None:
        there.store.move_tag(head.moving_tag, head, context.clock())


def _check_lock(request: PublishRequest) -> None:
    """Refuse an image of another lock, whose digest its tag would state."""
    own, lock = request.image.record.lock_digest, request.lock.lock.digest
    if own != lock:
        raise PublicationRefusedError(
            f"the image {request.image.name} is not published",
            why=f"It was made from lock {own}; the lock now is {lock}.",
            fix=f"Build and certify it from the lock as it is: {request.image.command}",
            reason="another-lock",
        )


def _check_project(request: PublishRequest) -> None:
    """Refuse an image with code of which no commit is known."""
    project = request.lock.lock.project
    if project is None or request.allow_dirty or (project.commit and not project.dirty):
        return
    commit = f"its files differed from commit {project.commit[:12]}" if project.commit else "it was in no repository"
    raise PublicationRefusedError(
        f"the image {request.image.name} is not published",
        why=f"Its uv project's own code is in it, and when that was locked, {commit}: nobody could say what it is.",
        fix="Commit the changes, lock again and build; or publish it all the same: --allow-dirty.",
        reason="dirty-project",
    )


def _check_files(image: PlacedImage, context: Context) -> None:
    try:
        check_unchanged(image, context.store)
    except CheckRefusedError as error:
        raise PublicationRefusedError(
            f"the image {image.name} is not published", why=error.why, fix=error.fix, reason="changed-files"
        ) from error


def _admit(request: PublishRequest, context: Context) -> Admitted:
    rules = Rules(policy=request.policy, target=request.selection.target, trust=request.trust, at=context.clock())
    admitted = admit(request.image, request.certificate, rules)
    if request.policy.signed_publication:
        _check_signer(request, context)
    return admitted


def _check_signer(request: PublishRequest, context: Context) -> None:
    """Refuse to publish what readers under the same policy would not take."""
    signer, record, trust = request.signer, request.image.record, require_trust(request.trust)
    key = trust.keys.get(signer.keyid) if signer else None
    if signer is None:
        why = "There is no key to sign the publication with: whoever may push there could give the image another tag."
    elif key is None:
        why = f"Key {signer.keyid:.16} would sign it; {trust.path} has other keys: {trust.names()}."
    else:
        why = objection_to_key(key, record.stack, record.target, request.policy, context.clock())
    if why:
        raise PublicationRefusedError(
            f"the image {request.image.name} is not published",
            why=why,
            fix="Name a key that readers trust: --key FILE, or signing.key of the configuration. Without one, you and "
            "readers need a policy of your own with signed_publication = false (envs/policies/NAME.toml).",
            reason="publication-key",
        )


def _manifests(manifest: bytes, draft: Publication) -> dict[str, RegistryManifest]:
    """The image's manifests by their immutable tags; docker's has one of its own."""
    manifests = {draft.tag: RegistryManifest(content=manifest, media_type=MANIFEST_TYPE)}
    if draft.docker_digest is not None:
        docker = RegistryManifest(content=docker_manifest(manifest), media_type=DOCKER_MANIFEST_TYPE)
        manifests[draft.tag + DOCKER_SUFFIX] = docker
    return manifests


def _artifacts(
    request: PublishRequest, manifest: bytes, admitted: Admitted | None, draft: Publication, folder: Path
) -> list[Artifact]:
    attached = [*artifacts.report_artifacts(request.image)]
    if admitted is not None:
        attached += artifacts.certificate_artifacts(manifest, admitted, request.signer, folder)
    if draft.sqsh is not None and not draft.sqsh.place:
        attached.append(artifacts.sqsh_artifact(request.image, manifest, draft.sqsh))
    return attached


def _attach(request: PublishRequest, registry: Registry, attached: Sequence[Artifact], draft: Publication) -> Sent:
    sent = push_blobs(registry, [artifact.blob for artifact in attached], mount_from=request.mount_from)
    by_type: dict[str, list[bytes]] = {}
    for artifact in attached:
        by_type.setdefault(artifact.artifact_type, []).append(artifact.manifest)
    return sent + Sent(bytes_sent=attach(registry, by_type, draft.oci_digest))


def _tag(registry: Registry, wanted: Mapping[str, RegistryManifest]) -> None:
    """Give the image's manifests their immutable tags."""
    for tag, content in wanted.items():
        if digest_of_tag(registry, tag) != content.digest:
            put_manifest(registry, tag, content)
        # Looked at afterwards: registries have no conditional write of a tag.
        if (now := digest_of_tag(registry, tag)) != content.digest:
            raise index.taken(registry, tag, f"It was written, and names {now}.")
