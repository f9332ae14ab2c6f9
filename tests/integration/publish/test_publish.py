"""Images that are published to docker's registry: what is there afterwards, and what other clients read of it."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run_here
from helpers.locks import MAIN
from helpers.publish_world import PublishWorld, measured_now
from helpers.stores import PASSWORD, USER
from integration.publish.conftest import Secure

from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.core.errors import PublicationRefusedError
from envbuild.lock.models import LockedProject
from envbuild.oci.push import RegistryManifest, digest_of_tag, put_manifest, read_manifest
from envbuild.oci.referrers import INDEX_TYPE, list_referrers
from envbuild.publish.bundle import certificate_in
from envbuild.publish.index import read_index, record
from envbuild.publish.models import Publication
from envbuild.publish.moving import NOTHING, move_tag
from envbuild.publish.publish import publish
from envbuild.publish.revoke import revoke
from envbuild.publish.sqsh_stores import open_sqsh_store
from envbuild.publish.tags import INDEX_TAG
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags


def skopeo(*words: str | Path, ca: Path, out: Path) -> None:
    """Copy an image with skopeo, which checks every digest."""
    folder = out.with_name("certs")
    folder.mkdir(exist_ok=True)
    (folder / "ca.crt").write_bytes(ca.read_bytes())
    subprocess.run(
        ["skopeo", "--insecure-policy", "copy", "--src-cert-dir", folder, f"--src-creds={USER}:{PASSWORD}", *words],
        check=True,
    )


def test_a_certified_image_is_published_once(
    secure: Secure, repository: str, world: PublishWorld, tmp_path: Path
) -> None:
    certificate = world.certify()
    first = publish(world.request(f"{secure.host}/{repository}"), world.context)
    publication = first.publication
    registry = secure.registry(repository)
    record = world.image.record
    assert not first.nothing_to_do
    assert first.sent.sent == len(record.layers) + 2  # the configuration, and the empty blob of artifacts
    assert publication.tag == f"mcore-debian12-{record.lock_digest[7:19]}-cpu"
    assert publication.moving_tag == "mcore-debian12-cpu"
    assert publication.certified
    assert read_index(registry) == (publication,)
    for tag in (publication.tag, publication.moving_tag):
        assert digest_of_tag(registry, tag) == record.oci_digest
        assert digest_of_tag(registry, f"{tag}-docker") == publication.docker_digest
    attached = {referrer.artifact_type: referrer for referrer in list_referrers(registry, record.oci_digest)}
    assert set(attached) == {
        "application/vnd.cyclonedx+json",
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        "application/x-squashfs",
    }
    squashed = read_manifest(registry, attached["application/x-squashfs"].digest)
    assert squashed is not None
    (layer,) = json.loads(squashed.content)["layers"]
    assert layer["digest"] == record.sqsh_digest
    assert certificate.is_file()

    again = publish(world.request(f"oci://{secure.host}/{repository}"), world.context)
    assert again.nothing_to_do
    assert again.bytes_sent == 0
    assert again.publication == publication

    for tag in (publication.moving_tag, f"{publication.moving_tag}-docker"):
        skopeo(f"docker://{secure.host}/{repository}:{tag}", f"dir:{tmp_path / tag}", ca=secure.ca, out=tmp_path / tag)
        assert (tmp_path / tag / record.layers[0].digest.removeprefix("sha256:")).is_file()


def test_without_a_certificate_nothing_is_sent(secure: Secure, repository: str, world: PublishWorld) -> None:
    registry = secure.registry(repository)
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(f"{secure.host}/{repository}"), world.context)
    assert caught.value.reason == "no-certificate"
    assert list_tags(registry) == []
    publication = publish(world.request(f"{secure.host}/{repository}", uncertified=True), world.context).publication
    assert not publication.certified
    assert publication.tag.startswith("uncertified-mcore-debian12-")
    assert {tag.startswith(("uncertified-", "envbuild-index", "sha256-")) for tag in list_tags(registry)} == {True}


def test_a_changed_image_is_not_published(secure: Secure, repository: str, world: PublishWorld) -> None:
    world.certify()
    blob = world.image.path / "oci/blobs/sha256" / world.image.record.layers[1].digest[7:]
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(f"{secure.host}/{repository}"), world.context)
    assert caught.value.reason == "changed-files"
    assert list_tags(secure.registry(repository)) == []


def test_an_image_of_an_older_lock_is_not_published(secure: Secure, repository: str, world: PublishWorld) -> None:
    """Its tag would state the digest of a lock that it is not of."""
    world.certify()
    older = world.image
    world.rebuild(main=MAIN.replace("0.30", "0.31"))
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(f"{secure.host}/{repository}", image=older), world.context)
    assert caught.value.reason == "another-lock"
    assert list_tags(secure.registry(repository)) == []


@pytest.mark.parametrize("commit", ["c" * 40, None])
def test_a_project_with_changes_that_no_commit_has_is_not_published(
    secure: Secure, repository: str, world: PublishWorld, commit: str | None
) -> None:
    world.certify()
    project = LockedProject(commit=commit, dirty=commit is not None, uv_lock=world.lock.lock.digest, pyproject="x")
    dirty = replace(world.lock, lock=world.lock.lock.model_copy(update={"project": project}))
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(f"{secure.host}/{repository}", lock=dirty), world.context)
    assert caught.value.reason == "dirty-project"
    assert ("cccccccccccc" in caught.value.why) is (commit is not None)
    assert list_tags(secure.registry(repository)) == []
    published = publish(world.request(f"{secure.host}/{repository}", lock=dirty, allow_dirty=True), world.context)
    assert published.publication.certified


def test_the_moving_tag_follows_and_goes_back(secure: Secure, repository: str, world: PublishWorld) -> None:
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)
    world.renew()
    world.certify()
    second = publish(world.request(to), world.context)
    assert second.publication.tag != first.tag
    assert (second.sent.sent, second.sent.present) == (2, 3)  # one layer and the configuration
    assert digest_of_tag(registry, first.moving_tag) == second.publication.oci_digest
    assert digest_of_tag(registry, first.tag) == first.oci_digest
    assert [publication.tag for publication in read_index(registry)] == [first.tag, second.publication.tag]

    taken_back = revoke(to, second.publication.oci_digest, "wrong NCCL", world.context)
    assert taken_back.heads == {first.moving_tag: first}
    assert digest_of_tag(registry, first.moving_tag) == first.oci_digest
    assert digest_of_tag(registry, f"{first.moving_tag}-docker") == first.docker_digest
    revoked = read_index(registry)[1]
    assert revoked.revoked is not None
    assert revoked.revoked.reason == "wrong NCCL"
    assert not revoked.certified
    assert revoke(to, second.publication.oci_digest, "again", world.context).nothing_to_do
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(to), world.context)
    assert caught.value.reason == "revoked"
    assert "wrong NCCL" in caught.value.why

    sqsh = first.sqsh
    assert sqsh is not None
    assert revoke(to, sqsh.digest, "all of it", world.context).heads == {first.moving_tag: None}
    left = read_manifest(registry, first.moving_tag)
    assert left is not None
    assert json.loads(left.content)["artifactType"] == "application/vnd.envbuild.nothing.v1+json"


def test_another_image_of_the_same_lock_has_a_tag_of_its_own(
    secure: Secure, repository: str, world: PublishWorld
) -> None:
    to = f"{secure.host}/{repository}"
    first = world.publish(to)
    world.rebuild({"base": b"made on another day"})
    second = world.publish(to)
    assert second.tag == f"{first.tag}-r2"
    assert digest_of_tag(secure.registry(repository), first.tag) == first.oci_digest
    assert publish(world.request(to), world.context).nothing_to_do


def test_a_newer_certificate_takes_the_place_of_an_older_one(
    secure: Secure, repository: str, world: PublishWorld
) -> None:
    to = f"{secure.host}/{repository}"
    yesterday = (datetime.now(timezone.utc) - timedelta(days=1)).strftime(MOMENT_FORMAT)
    world.certify(issued_at=yesterday, measured=measured_now(started_at=yesterday, finished_at=yesterday))
    first = publish(world.request(to), world.context).publication
    world.certify()
    second = publish(world.request(to), world.context)
    assert second.sent.sent == 0
    assert second.publication.tag == first.tag
    assert second.publication.certified_at is not None
    assert second.publication.certified_at > yesterday
    assert read_index(secure.registry(repository)) == (second.publication,)


def test_a_tag_of_somebody_else_is_left_alone(secure: Secure, repository: str, world: PublishWorld) -> None:
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)
    other = RegistryManifest(content=NOTHING.content.replace(b"revoked", b"somebody"), media_type=NOTHING.media_type)
    put_manifest(registry, first.moving_tag, other)
    world.renew()
    world.certify()
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(to), world.context)
    assert caught.value.reason == "foreign-tag"
    assert digest_of_tag(registry, first.moving_tag) == other.digest
    publication = publish(world.request(to, moving_tag="stable"), world.context).publication
    assert digest_of_tag(registry, "stable") == publication.oci_digest


def test_a_moving_tag_belongs_to_one_lock_and_target(secure: Secure, repository: str, world: PublishWorld) -> None:
    to = f"{secure.host}/{repository}"
    world.publish(to, moving_tag="stable")
    image = replace(world.image, lock_name="tuned")
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(to, image=image, moving_tag="stable"), world.context)
    assert caught.value.reason == "tag-of-another"


def test_a_clock_that_is_behind_is_noticed(secure: Secure, repository: str, world: PublishWorld) -> None:
    to = f"{secure.host}/{repository}"
    world.certify()
    ahead = replace(world.context, clock=lambda: datetime.now(timezone.utc) + timedelta(minutes=30))
    publish(world.request(to), ahead)
    world.renew()
    world.certify()
    with pytest.raises(PublicationRefusedError) as caught:
        publish(world.request(to), world.context)
    assert caught.value.reason == "clock"


def test_layers_are_mounted_from_another_repository(secure: Secure, repository: str, world: PublishWorld) -> None:
    world.publish(f"{secure.host}/{repository}")
    other = f"{repository}-other"
    done = publish(world.request(f"{secure.host}/{other}", mount_from=("no/such", repository)), world.context)
    assert (done.sent.sent, done.sent.mounted) == (0, 5)
    assert done.attached.sent == 0
    assert digest_of_tag(secure.registry(other), done.publication.moving_tag) == done.publication.oci_digest


def test_the_sqsh_goes_to_a_store_instead(secure: Secure, repository: str, world: PublishWorld, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    place, to = f"{tmp_path}/share", f"{secure.host}/{repository}"
    publication = world.publish(to, sqsh_to=place)
    registry = secure.registry(repository)
    assert "application/x-squashfs" not in {
        referrer.artifact_type for referrer in list_referrers(registry, publication.oci_digest)
    }
    store = open_sqsh_store(place, world.context.site)
    assert store.publications() == (publication,)
    assert store.find(publication.moving_tag) == publication
    bundle = store.bundle(publication)
    assert bundle is not None
    assert certificate_in(bundle, "the store") == world.request(to).certificate.read_bytes()  # type: ignore[union-attr]
    assert publish(world.request(to, sqsh_to=place), world.context).nothing_to_do
    revoke(to, publication.oci_digest, "wrong", world.context)
    (kept,) = store.publications()
    assert kept.revoked is not None


def test_a_revocation_reaches_the_store(secure: Secure, repository: str, world: PublishWorld, tmp_path: Path) -> None:
    """The index names one place of a .sqsh: it stays that one. Others are named with the revocation."""
    place, other, to = tmp_path / "share", tmp_path / "other", f"{secure.host}/{repository}"
    for folder in (place, other):
        folder.mkdir()
    publication = world.publish(to, sqsh_to=str(place))
    for changes in ({}, {"sqsh_to": str(other)}):
        with pytest.raises(PublicationRefusedError) as caught:
            publish(world.request(to, **changes), world.context)
        assert caught.value.reason == "sqsh-elsewhere"
        assert str(place) in caught.value.fix
    assert publish(world.request(to, sqsh=False), world.context).nothing_to_do
    # Of another repository, whose index has it elsewhere.
    world.publish(f"{to}-2", sqsh_to=str(other))
    store = open_sqsh_store(str(other), world.context.site)
    revoke(to, publication.oci_digest, "wrong", world.context, sqsh_to=str(other))
    for kept in (store.publications(), open_sqsh_store(str(place), world.context.site).publications()):
        assert [other.revoked.reason if other.revoked else "" for other in kept] == ["wrong"]


def test_a_lost_index_is_made_again(secure: Secure, repository: str, world: PublishWorld) -> None:
    """Also one that another writer replaced: each publication has a tag of its own."""
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)
    world.renew()
    second = world.publish(to)
    revoke(to, first.oci_digest, "wrong", world.context)
    known = read_index(registry)
    nothing = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}).encode()
    empty = RegistryManifest(content=nothing, media_type=INDEX_TYPE)
    put_manifest(registry, INDEX_TAG, empty)
    record(registry, second, 1000)
    assert [(listed.tag, listed.revoked is None) for listed in read_index(registry)] == [
        (listed.tag, listed.revoked is None) for listed in known
    ]


def remove(registry: Registry, path: str) -> None:
    registry.ask("DELETE", path, accept=(202,))


def test_an_index_that_is_not_there_is_read_from_the_publications_own_tags(
    secure: Secure, repository: str, world: PublishWorld
) -> None:
    """Publishing, taking back and reading go on; the next publication writes it anew."""
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)

    def lose_index() -> None:
        remove(registry, f"manifests/{digest_of_tag(registry, INDEX_TAG)}")
        assert read_manifest(registry, INDEX_TAG) is None

    lose_index()
    assert read_index(registry) == (first,)
    again = publish(world.request(to), world.context)
    assert (again.publication, again.sent.sent, again.attached.sent) == (first, 0, 0)
    assert read_manifest(registry, INDEX_TAG) is not None
    lose_index()
    taken_back = revoke(to, first.oci_digest, "wrong", world.context)
    assert taken_back.heads == {first.moving_tag: None}
    lose_index()
    (kept,) = read_index(registry)
    assert kept.revoked is not None
    with pytest.raises(PublicationRefusedError, match="not published again"):
        publish(world.request(to), world.context)


@pytest.mark.slow
def test_one_image_under_two_moving_tags_at_the_same_moment(
    secure: Secure, repository: str, world: PublishWorld
) -> None:
    """An immutable tag belongs to one of them: the other is told so, and takes the next one."""
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    world.certify()
    names = [None, "other", "third"]

    def write(name: str | None) -> bool:
        try:
            publish(world.request(to, moving_tag=name), world.context)
        except PublicationRefusedError as error:
            assert error.reason == "tag-taken"
            return False
        return True

    with ThreadPoolExecutor(len(names)) as pool:
        done = list(pool.map(write, names))
    listed = {publication.moving_tag for publication in read_index(registry)}
    assert listed >= {name or "mcore-debian12-cpu" for name, there in zip(names, done, strict=True) if there}
    assert all(write(name) for name in names)
    publications = read_index(registry)
    assert {publication.moving_tag for publication in publications} == {"mcore-debian12-cpu", "other", "third"}
    assert len({publication.tag for publication in publications}) == len(publications)


def test_the_record_of_another_publisher_is_not_replaced(secure: Secure, repository: str, world: PublishWorld) -> None:
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)
    other = first.model_copy(update={"moving_tag": "other"})
    with pytest.raises(PublicationRefusedError, match="taken meanwhile"):
        record(registry, other, 1000)
    assert read_index(registry) == (first,)
    # One that was killed before the index had it keeps its tag, too.
    remove(registry, f"manifests/{digest_of_tag(registry, INDEX_TAG)}")
    second = publish(world.request(to, moving_tag="other"), world.context).publication
    assert second.tag == f"{first.tag}-r2"
    assert read_index(registry) == (first, second)


@pytest.mark.slow
def test_what_was_removed_is_published_again(
    secure: Secure, repository: str, world: PublishWorld, tmp_path: Path
) -> None:
    """A layer, the .sqsh, and what a .sqsh store has."""
    registry, to, place = secure.registry(repository), f"{secure.host}/{repository}", tmp_path / "sqsh"
    publication = world.publish(to)
    layer = world.image.record.layers[-1].digest
    assert publication.sqsh is not None
    for digest in (layer, publication.sqsh.digest):
        remove(registry, f"blobs/{digest}")
        again = publish(world.request(to), world.context)
        assert not again.nothing_to_do
        assert (again.publication, again.sent.sent + again.attached.sent) == (publication, 1)
        registry.ask("HEAD", f"blobs/{digest}", accept=(200,))
    assert publish(world.request(to), world.context).nothing_to_do
    place.mkdir()
    stored = publish(world.request(to, sqsh_to=str(place)), world.context).publication
    for folder in ("sqsh", "certificates", "publications", "tags"):
        for file in (place / folder).rglob("*"):
            if file.is_file():
                file.unlink()
        assert not publish(world.request(to, sqsh_to=str(place)), world.context).nothing_to_do, folder
        assert open_sqsh_store(str(place), world.context.site).publications() == (stored,)
        assert publish(world.request(to, sqsh_to=str(place)), world.context).nothing_to_do


def test_publishers_at_the_same_moment_lose_nothing(secure: Secure, repository: str, world: PublishWorld) -> None:
    """Ten writers of the index and of one moving tag; the newest has the tag, and all are listed."""
    registry, to = secure.registry(repository), f"{secure.host}/{repository}"
    first = world.publish(to)
    start = moment_of(first.published_at)
    others = [
        first.model_copy(
            update={
                "tag": f"{first.tag}-{number}",
                "published_at": (start + timedelta(minutes=number)).strftime(MOMENT_FORMAT),
            }
        )
        for number in range(1, 11)
    ]

    def write(publication: Publication) -> None:
        own = secure.registry(repository)
        record(own, publication, 1000)
        move_tag(own, publication.moving_tag)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(write, others))
    assert read_index(registry) == (first, *others)


def test_the_command_line(secure: Secure, repository: str, world: PublishWorld) -> None:
    """Publish, again, revoke; no output holds the password."""
    world.certify()
    to = ["--json", "--to", f"{secure.host}/{repository}"]
    image = ["--stack", "mcore", "--target", "cpu", "--base", "debian12"]
    image += ["--trust", "trust.toml", "--key", str(world.key)]
    env = {**os.environ, "ENVBUILD_CACHE_DIR": str(world.project / "cache")}

    def call(*words: str) -> Any:
        done = run_here(["publish", *to, *words], world.project, env)
        assert done.returncode == 0, done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return json.loads(done.stdout)

    first = call(*image)
    assert not first["nothing_to_do"]
    assert first["publication"]["certificate_digest"] is not None
    assert first["blobs"]["sent"] == 5 + 4  # the SBOM, the certificate, the test result and the .sqsh
    assert first["bytes_sent"] > first["image_bytes_sent"] > first["publication"]["size_bytes"]
    assert call(*image)["nothing_to_do"]
    taken_back = call("--revoke", first["publication"]["oci_digest"], "--reason", "wrong NCCL")
    assert taken_back["moving_tags"] == {first["publication"]["moving_tag"]: None}
    again = run_here(["publish", *to, *image], world.project, env)
    assert again.returncode == 9
    assert json.loads(again.stdout)["error"]["reason"] == "revoked"
    missing = run_here(["publish", *to, "--revoke", f"sha256:{'0' * 64}", "--reason", "x"], world.project, env)
    assert missing.returncode == 3
    (row,) = json.loads(run_here(["ledger", "export", "--json"], world.project, env).stdout)["publications"]
    assert (row["oci_digest"], row["revoked_reason"]) == (first["publication"]["oci_digest"], "wrong NCCL")
    lost = {**env, "ENVBUILD_STATE_DIR": str(world.project / "lost")}
    rebuilt = run_here(["ledger", "rebuild", "--from", f"{secure.host}/{repository}"], world.project, lost)
    assert "1 publications" in rebuilt.stdout, rebuilt.stderr
    known = json.loads(run_here(["ledger", "export", "--json"], world.project, lost).stdout)
    assert known["publications"] == [row]
    assert [certificate["digest"] for certificate in known["certificates"]] == [row["certificate_digest"]]
    assert len(known["cases"]) == 1
