"""What somebody may try who can push to the repository, and has no trusted key: mix, roll back, retag, forge, date.

Everything is done with docker's registry, by the requests that such an account may send.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.publications import make_publication
from helpers.publish_world import PublishWorld
from integration.publish.conftest import Secure
from integration.publish.test_pull import check_error, pulled

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import CertificateRefusedError, CheckRefusedError, EnvbuildError, PublicationRefusedError
from envbuild.oci.push import RegistryManifest, digest_of_tag, push_blobs, put_manifest, read_manifest
from envbuild.oci.referrers import INDEX_TYPE, tag_of
from envbuild.publish.artifacts import empty_blob
from envbuild.publish.models import Publication
from envbuild.publish.moving import NOTHING
from envbuild.publish.publish import publish
from envbuild.publish.records import entry_manifest
from envbuild.publish.revoke import revoke
from envbuild.publish.signature import sign_publication
from envbuild.store.registry import Registry

DOCUMENT = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
INDEX = "envbuild-index"
NEWER = {"torch": b"newer" * 900}


class Attacker:
    """An account that may push, and nothing else."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def index(self) -> RegistryManifest:
        manifest = read_manifest(self.registry, INDEX)
        assert manifest is not None
        return manifest

    def write_back(self, index: RegistryManifest) -> None:
        put_manifest(self.registry, INDEX, index)

    def list_also(self, publication: Publication, **changes: object) -> None:
        """List a publication with other fields, next to what is listed."""
        document = json.loads(self.index().content)
        entry = next(each for each in document["manifests"] if each["digest"] == publication.oci_digest)
        forged = publication.model_copy(update=changes)
        entry = {**entry, "annotations": {"org.envbuild.publication": forged.canonical().decode()}}
        document["manifests"] = [
            *(each for each in document["manifests"] if self.tag(each) != forged.tag),
            entry,
        ]
        self.write_back(replace(self.index(), content=json.dumps(document).encode()))

    def relist(self, publication: Publication, **changes: object) -> None:
        """List a publication with other fields, in its place."""
        document = json.loads(self.index().content)
        forged = publication.model_copy(update=changes)
        for entry in document["manifests"]:
            if self.tag(entry) == publication.tag:
                entry["digest"] = forged.oci_digest
                entry["annotations"] = {"org.envbuild.publication": forged.canonical().decode()}
        self.write_back(replace(self.index(), content=json.dumps(document).encode()))

    @staticmethod
    def tag(entry: Any) -> str:
        return str(json.loads(entry["annotations"]["org.envbuild.publication"])["tag"])


def spoiled_record(record: RegistryManifest, publication: Publication, junk: dict[str, Any]) -> RegistryManifest:
    """What an attacker puts into the place of a record."""
    if "manifest" in junk:
        return junk["manifest"]  # type: ignore[no-any-return]
    document = json.loads(record.content)
    if "of" in junk:
        forged = publication.model_copy(update=junk["of"]).canonical().decode()
        document["annotations"]["org.envbuild.publication"] = forged
    else:
        document |= junk
    return replace(record, content=json.dumps(document).encode())


@pytest.fixture
def place(secure: Secure, repository: str) -> str:
    return f"{secure.host}/{repository}"


@pytest.fixture
def attacker(secure: Secure, repository: str) -> Attacker:
    return Attacker(secure.registry(repository))


def refused(world: PublishWorld, reference: str, **changes: Any) -> EnvbuildError:
    with pytest.raises((CertificateRefusedError, PublicationRefusedError)) as caught:
        pulled(world, reference, **changes)
    check_error(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"tag": "other-0123456789ab-cpu", "moving_tag": "other-cpu"},
        {"tag": "other-{lock}-cpu", "moving_tag": "other-cpu"},
        {"tag": "other-{lock}-cpu", "moving_tag": "other-cpu", "lock_name": "other"},
        {"tag": "other-{lock}-cpu", "moving_tag": "other-cpu", "signature": None},
        {"moving_tag": "other-cpu"},
    ],
    ids=["another lock's", "this lock's", "with its name", "unsigned", "the moving one alone"],
)
def test_tags_of_another_stack(place: str, attacker: Attacker, world: PublishWorld, changes: dict[str, Any]) -> None:
    publication = world.publish(place)
    lock = short(publication.lock_digest)
    attacker.list_also(
        publication, **{name: value.format(lock=lock) if value else None for name, value in changes.items()}
    )
    assert refused(world, f"{place}:other-cpu").reason in ("tag", "publication-signature")
    assert refused(world, f"{place}:other", target="cpu").reason in ("tag", "publication-signature")


def test_a_signature_of_a_key_that_nobody_trusts(
    place: str, attacker: Attacker, world: PublishWorld, tmp_path: Any
) -> None:
    from envbuild.certify.certificate.keys import make_keys
    from envbuild.certify.certificate.sign import load_signer

    publication = world.publish(place)
    forger = load_signer(str(make_keys(tmp_path / "forger", "forger", None).private), None)
    forged = sign_publication(publication.model_copy(update={"moving_tag": "mcore-stable"}), forger)
    attacker.list_also(forged)
    assert "has other keys" in refused(world, f"{place}:mcore-stable").why
    attacker.list_also(forged, signature=publication.signature)
    assert "the entry was changed, or forged" in refused(world, f"{place}:mcore-stable").why


@pytest.mark.parametrize("of", ["the index", "the tags"])
def test_a_revocation_that_is_rolled_back(place: str, attacker: Attacker, world: PublishWorld, of: str) -> None:
    publication = world.publish(place)
    before = attacker.index()
    revoke(place, publication.oci_digest, "wrong NCCL", world.context)
    if of == "the index":
        attacker.write_back(before)
    else:
        # An account that may push writes over a tag; it cannot take it away.
        entry = read_manifest(attacker.registry, f"{publication.tag}-publication")
        assert entry is not None
        put_manifest(attacker.registry, f"{publication.tag}-revoked", entry)
    for reference in (f":{publication.moving_tag}", f":{publication.tag}", f"@{publication.oci_digest}"):
        assert refused(world, place + reference).reason == "revoked"
    assert publication.sqsh is not None
    assert refused(world, f"{place}@{publication.sqsh.digest}").reason == "revoked"
    # Nor does the next night publish it again, or let the moving tag name it.
    with pytest.raises(PublicationRefusedError, match="is not published again") as caught:
        world.publish(place)
    check_error(caught.value)
    assert digest_of_tag(attacker.registry, publication.moving_tag) == NOTHING.digest


def test_a_revocation_is_not_held_up(place: str, attacker: Attacker, world: PublishWorld) -> None:
    """By an index from before the image, a record that is another's, or a tag that is somebody else's."""
    first = world.publish(place)
    before = attacker.index()
    world.rebuild(NEWER)
    second = world.publish(place)
    entry = read_manifest(attacker.registry, f"{first.tag}-publication")
    assert entry is not None
    attacker.write_back(before)
    revoke(place, second.oci_digest, "not in that index", world.context)
    assert refused(world, f"{place}:{second.tag}").reason == "revoked"
    assert digest_of_tag(attacker.registry, first.moving_tag) == first.oci_digest

    attacker.list_also(first, tag=f"{first.tag}-r7", moving_tag="aaa")
    put_manifest(attacker.registry, "aaa", entry)
    forged = json.loads(entry.content)
    forged["annotations"]["org.envbuild.publication"] = (
        first.model_copy(update={"moving_tag": "x"}).canonical().decode()
    )
    put_manifest(attacker.registry, f"{first.tag}-publication", replace(entry, content=json.dumps(forged).encode()))
    with pytest.raises(PublicationRefusedError, match="the tag aaa") as caught:
        revoke(place, first.oci_digest, "wrong NCCL", world.context)
    check_error(caught.value)
    assert "was taken back" in caught.value.why
    assert refused(world, f"{place}:{first.moving_tag}").reason == "revoked"
    assert digest_of_tag(attacker.registry, first.moving_tag) == NOTHING.digest


ANOTHER = sha256_bytes(b"another image")


JUNK: tuple[dict[str, Any], ...] = (
    {"manifest": NOTHING},
    {"manifest": RegistryManifest(content=DOCUMENT.encode(), media_type=INDEX_TYPE)},
    {"annotations": {}},
    {"annotations": {"org.envbuild.publication": "[" * 50_000}},
    {"annotations": {"org.envbuild.publication": "\x1b[2J\nhelp: rm -rf /"}},
    {"subject": None},
    {"of": {"schema_": "envbuild.publication/9"}},
    {"of": {"oci_digest": ANOTHER}},
    {"of": {"tag": "other-debian12-0123456789ab-cpu"}},
    {"of": {"published_at": "2099-01-01T00:00:00Z", "signature": None}},
)


@pytest.mark.slow
def test_junk_in_the_place_of_records_keeps_nobody_from_publishing(
    place: str, attacker: Attacker, world: PublishWorld, tmp_path: Any
) -> None:
    """Before the first publication, and before each next one."""
    push_blobs(attacker.registry, [empty_blob(tmp_path)])
    model = make_publication(lock_digest=world.image.record.lock_digest, oci_digest=world.image.record.oci_digest)
    own = f"mcore-debian12-{short(model.lock_digest)}-cpu"
    record = entry_manifest(model, 1000)
    for number, junk in enumerate(JUNK, 1):
        tag = own + (f"-r{number}" if number > 1 else "")
        for name in (f"{tag}-publication", "notes-publication", "notes-revoked"):
            put_manifest(attacker.registry, name, spoiled_record(record, model, junk))
        publication = world.publish(place, sqsh=False)
        assert publication.tag == tag
        digest = digest_of_tag(attacker.registry, publication.moving_tag)
        assert digest == publication.oci_digest, junk
        world.rebuild({"torch": b"%d" % number * 900})
    assert len(world.notes.lines) >= len(JUNK) - 1
    assert all("is refused, and written anew: " in line for line in world.notes.lines if line.startswith("note: "))
    revoke(place, publication.oci_digest, "wrong NCCL", world.context)
    assert digest_of_tag(attacker.registry, f"{publication.tag}-revoked")


def test_records_that_nobody_signed_do_not_hold_a_moving_tag(
    place: str, attacker: Attacker, world: PublishWorld
) -> None:
    first = world.publish(place)
    ahead = (world.context.clock() + timedelta(hours=5)).strftime(MOMENT_FORMAT)
    for changes in ({"lock_name": "theirs"}, {"published_at": ahead, "signature": None}):
        attacker.list_also(first, tag=f"{first.tag}-r7", **changes)
        world.rebuild({"torch": repr(changes).encode() * 900})
        newer = world.publish(place)
        assert newer.moving_tag == first.moving_tag
        assert pulled(world, f"{place}:{newer.tag}").publication == newer


def test_a_revoked_image_under_another_tag(place: str, attacker: Attacker, world: PublishWorld) -> None:
    publication = world.publish(place)
    before = attacker.index()
    revoke(place, publication.oci_digest, "wrong NCCL", world.context)
    attacker.write_back(before)
    attacker.list_also(publication, tag=f"{publication.tag}-r2", moving_tag="mcore-debian12-x-cpu")
    for name in (f"{publication.tag}-r2", "mcore-debian12-x-cpu"):
        assert refused(world, f"{place}:{name}").reason == "revoked"


def test_a_revocation_of_an_older_envbuild_counts(place: str, attacker: Attacker, world: PublishWorld) -> None:
    """It has no tag of the digest: the index has it, or the tag of the immutable one."""
    publication = world.publish(place)
    before = attacker.index()
    revoke(place, publication.oci_digest, "wrong NCCL", world.context)
    attacker.registry.ask(
        "DELETE", f"manifests/{digest_of_tag(attacker.registry, f'{publication.tag}-revoked')}", accept=(202, 405)
    )
    entry = attacker.index()
    attacker.write_back(before)
    put_manifest(attacker.registry, f"{publication.tag}-revoked", entry)
    assert refused(world, f"{place}:{publication.tag}").reason == "revoked"


def test_a_moment_in_the_future_holds_nobody_back(place: str, attacker: Attacker, world: PublishWorld) -> None:
    first = world.publish(place)
    attacker.list_also(
        first, published_at="2099-01-01T00:00:00Z", tag=f"{first.tag}-r7", certified_at="2099-01-01T00:00:00Z"
    )
    world.rebuild(NEWER)
    second = world.publish(place)
    assert pulled(world, f"{place}:{first.moving_tag}").publication == second
    # The same image as it is there, dated so.
    attacker.list_also(second, published_at="2099-01-01T00:00:00Z", certified_at="2099-01-01T00:00:00Z")
    again = world.publish(place)
    assert again.published_at < "2099"
    assert pulled(world, f"{place}:{first.moving_tag}").publication == again


def test_a_moment_of_tomorrow_is_over_with_its_revocation(place: str, attacker: Attacker, world: PublishWorld) -> None:
    first = world.publish(place)
    ahead = (world.context.clock() + timedelta(hours=5)).strftime(MOMENT_FORMAT)
    wrong = sign_publication(first.model_copy(update={"published_at": ahead}), world.signer)
    attacker.list_also(wrong)
    world.rebuild(NEWER)
    with pytest.raises(PublicationRefusedError, match="is from the future") as caught:
        world.publish(place)
    assert "revoke that publication" in caught.value.fix
    revoke(place, first.oci_digest, "its moment is wrong", world.context)
    second = world.publish(place)
    assert pulled(world, f"{place}:{first.moving_tag}").publication == second


def test_an_entry_that_was_changed_is_written_anew(place: str, attacker: Attacker, world: PublishWorld) -> None:
    """It does not count as published: nothing to do would be the answer for ever."""
    publication = world.publish(place)
    for changes in ({"stack": "other"}, {"signature": None}):
        attacker.list_also(publication, **changes)
        refused(world, f"{place}:{publication.tag}")
        again = world.publish(place)
        assert pulled(world, f"{place}:{publication.tag}").publication == again


def test_an_internal_name_is_no_moving_tag(place: str, world: PublishWorld, attacker: Attacker) -> None:
    publication = world.publish(place)
    before = attacker.index().digest, digest_of_tag(attacker.registry, publication.tag)
    world.rebuild(NEWER)
    with pytest.raises(PublicationRefusedError, match="cannot be a moving tag") as caught:
        world.publish(place, moving_tag=publication.tag)
    assert caught.value.reason == "reserved-tag"
    check_error(caught.value)
    assert before == (attacker.index().digest, digest_of_tag(attacker.registry, publication.tag))
    assert not read_manifest(attacker.registry, world.image.record.oci_digest)


def test_a_certificate_that_the_gate_would_refuse(place: str, attacker: Attacker, world: PublishWorld) -> None:
    """Of a trusted key: whoever may push attaches it, and lists the image with it."""
    world.certify(whole_matrix=False)
    lenient = world.selection.catalog.policy("default").model_copy(update={"whole_matrix": False})
    publication = publish(world.request(place, policy=lenient), world.context).publication
    assert refused(world, f"{place}:{publication.tag}").reason == "part-of-matrix"
    assert pulled(world, f"{place}:{publication.tag}", policy=lenient).publication == publication


@pytest.mark.parametrize("left_out", ["", "{tag}", "\ud800 \x1b[2J"], ids=["emptied", "left out", "no tags"])
def test_an_index_without_the_images_keeps_nobody_from_publishing(
    place: str, attacker: Attacker, world: PublishWorld, left_out: str
) -> None:
    first = world.publish(place)
    document = json.loads(DOCUMENT) | {"annotations": {"org.envbuild.left-out": left_out.format(tag=first.tag)}}
    attacker.write_back(replace(attacker.index(), content=json.dumps(document).encode()))
    assert world.publish(place).tag == first.tag
    assert pulled(world, f"{place}:{first.moving_tag}").publication.tag == first.tag


def test_an_image_without_a_key_for_its_publication(place: str, world: PublishWorld, attacker: Attacker) -> None:
    with pytest.raises(PublicationRefusedError) as caught:
        world.publish(place, signer=None)
    assert caught.value.reason == "publication-key"
    check_error(caught.value)
    assert not read_manifest(attacker.registry, INDEX)
    unsigned = world.selection.catalog.policy("default").model_copy(update={"signed_publication": False})
    publication = world.publish(place, signer=None, policy=unsigned)
    assert refused(world, f"{place}:{publication.tag}").reason == "publication-signature"
    assert pulled(world, f"{place}:{publication.tag}", policy=unsigned).publication == publication
    # Its tags follow from the certificate; others nobody vouches for.
    attacker.list_also(publication, moving_tag="stable")
    assert refused(world, f"{place}:stable", policy=unsigned).reason == "tag"


def test_an_index_from_before_the_newest_image(place: str, attacker: Attacker, world: PublishWorld) -> None:
    first = world.publish(place)
    before = attacker.index()
    world.rebuild(NEWER)
    second = world.publish(place)
    attacker.write_back(before)
    for name in (f":{first.moving_tag}", f":{second.tag}", f"@{second.oci_digest}"):
        assert pulled(world, f"{place}{name}").publication == second
    # The new one is said to be left out.
    document = json.loads(before.content) | {"annotations": {"org.envbuild.left-out": second.tag}}
    attacker.write_back(replace(before, content=json.dumps(document).encode()))
    assert pulled(world, f"{place}:{first.moving_tag}").publication == second
    # Its own record is written over, too, by the older one's.
    entry = read_manifest(attacker.registry, f"{first.tag}-publication")
    assert entry is not None
    put_manifest(attacker.registry, f"{second.tag}-publication", entry)
    with pytest.raises(CheckRefusedError, match="is refused") as caught:
        pulled(world, f"{place}:{first.moving_tag}")
    check_error(caught.value)


def test_junk_next_to_no_image_keeps_nobody_from_pulling(
    place: str, attacker: Attacker, world: PublishWorld, account: None
) -> None:
    """Only in the place of the record of an image that is there it may hide what is newer."""
    publication = world.publish(place)
    reference = f"{place}:{publication.moving_tag}"
    image = read_manifest(attacker.registry, publication.tag)
    assert image is not None
    planted = f"{publication.moving_tag.removesuffix('-cpu')}-0123456789ab-cpu"
    for name in ("notes-publication", f"{planted}-publication"):
        put_manifest(attacker.registry, name, NOTHING)
        assert pulled(world, reference).publication == publication, name
    put_manifest(attacker.registry, planted, image)
    with pytest.raises(CheckRefusedError, match=f"{planted}-publication") as caught:
        pulled(world, reference)
    check_error(caught.value)
    assert pulled(world, f"{place}@{publication.oci_digest}").publication == publication
    # The way out that it prints needs no removal.
    (command,) = re.findall("`(skopeo copy .+)`", caught.value.fix)
    put_manifest(attacker.registry, command.rpartition(":")[2], image)
    assert pulled(world, reference).publication == publication


def test_junk_in_the_place_of_a_list_of_referrers_is_written_over(
    place: str, attacker: Attacker, world: PublishWorld, tmp_path: Any
) -> None:
    push_blobs(attacker.registry, [empty_blob(tmp_path)])
    for _ in range(2):
        put_manifest(attacker.registry, tag_of(world.image.record.oci_digest), NOTHING)
        publication = world.publish(place)
        assert pulled(world, f"{place}:{publication.tag}").publication == publication


def test_a_revocation_that_somebody_else_wrote_keeps_nobody_from_publishing(
    place: str, attacker: Attacker, world: PublishWorld
) -> None:
    first = world.publish(place)
    before = attacker.index()
    world.rebuild(NEWER)
    second = world.publish(place)
    put_manifest(attacker.registry, f"{second.tag}-revoked", NOTHING)
    attacker.write_back(before)
    assert refused(world, f"{place}:{second.tag}").reason == "revoked"
    assert pulled(world, f"{place}:{first.moving_tag}").publication == first
    with pytest.raises(PublicationRefusedError, match="is not published again"):
        world.publish(place)
    world.rebuild({"torch": b"third" * 900})
    third = world.publish(place)
    assert pulled(world, f"{place}:{first.moving_tag}").publication == third


@pytest.mark.parametrize("status", [401, 403, 405])
def test_an_account_that_may_not_list_tags(
    proxy: FaultProxy, repository: str, world: PublishWorld, status: int
) -> None:
    publication = world.publish(f"{proxy.host}/{repository}")
    proxy.add(method="GET", path="tags/list", status=status)
    assert pulled(world, f"{proxy.host}/{repository}:{publication.moving_tag}").publication == publication
