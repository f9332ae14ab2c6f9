"""What goes from a repository, and what stays with all that refers to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.locks import MAIN
from helpers.publish_world import PublishWorld
from helpers.referrers_api import ReferrersApi
from integration.publish.conftest import opened
from integration.publish.test_attacks import Attacker, refused

from envbuild.core.errors import NetworkError
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import RegistryManifest, digest_of_tag, put_manifest, read_manifest
from envbuild.oci.referrers import INDEX_TYPE, list_referrers, tag_of
from envbuild.publish import collect
from envbuild.publish.collect import Needs, plan_sweep, sweep
from envbuild.publish.index import LEFT_OUT, read_index
from envbuild.publish.models import Publication
from envbuild.publish.revoke import revoke
from envbuild.publish.tags import revocation_tags
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags


@pytest.fixture
def removing(open_registry: str, account: None) -> str:
    """The host of a registry that allows removal."""
    return open_registry.removeprefix("http://")


def published(world: PublishWorld, to: str, count: int) -> list[Publication]:
    """Publications of several locks, one after the other."""
    publications = []
    for number in range(count):
        world.rebuild({"megatron-core": f"megatron {number}".encode()}, MAIN.replace("0.30", f"0.3{number}"))
        publications.append(world.publish(to))
    assert len({publication.oci_digest for publication in publications}) == count
    return publications


def is_whole(registry: Registry, publication: Publication) -> bool:
    """Whether an image is there by all its names, with what refers to it."""
    referrers = list_referrers(registry, publication.oci_digest)
    tags = {digest_of_tag(registry, tag) for tag in (publication.tag, f"{publication.tag}-publication")}
    whole = all(read_manifest(registry, referrer.digest) for referrer in referrers)
    types = {referrer.artifact_type for referrer in referrers}
    return whole and None not in tags and {"application/x-squashfs", collect.BUNDLE_TYPE} <= types


def test_what_nothing_needs_goes_with_what_refers_to_it(removing: str, repository: str, world: PublishWorld) -> None:
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    first, second, third, head = published(world, to, 4)
    referrers = list_referrers(registry, first.oci_digest)
    assert referrers
    needs = Needs(locks=frozenset({second.lock_digest}), images=frozenset({third.oci_digest}))
    planned = plan_sweep(registry, needs)
    assert planned.going == (first,)
    assert planned.kept == {
        second.tag: "a lock needs it",
        third.tag: "a late night needs it",
        head.tag: f"the tag {head.moving_tag} names it",
    }
    assert planned.damaged == ()
    sweep(registry, planned)
    assert [publication.tag for publication in read_index(registry)] == [second.tag, third.tag, head.tag]
    assert all(is_whole(registry, publication) for publication in (second, third, head))
    for digest in (first.oci_digest, first.docker_digest, *(referrer.digest for referrer in referrers)):
        assert digest is not None
        assert read_manifest(registry, digest) is None
    assert not [tag for tag in list_tags(registry) if tag.startswith(first.tag)]
    assert plan_sweep(registry, needs).going == ()
    # It can be published again, and goes again.
    (again,) = published(world, to, 1)
    assert again.tag == first.tag
    assert first.tag in {publication.tag for publication in read_index(registry)}
    (moved,) = plan_sweep(registry, needs).going
    assert moved.tag == head.tag


def test_what_was_revoked_stays(removing: str, repository: str, world: PublishWorld) -> None:
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    first, _ = published(world, to, 2)
    revoke(to, first.oci_digest, "wrong losses", world.context)
    assert plan_sweep(registry, Needs()).kept[first.tag] == "it was revoked"


@pytest.mark.slow
@pytest.mark.parametrize("api", [True, False], ids=["API", "tags"])
def test_a_removal_that_was_killed_is_finished_by_the_next(
    proxy: FaultProxy, registry: Registry, world: PublishWorld, monkeypatch: pytest.MonkeyPatch, api: bool
) -> None:
    """With the referrers API, too: it lists the record that a removal is finished by."""
    if api:
        ReferrersApi().put_before(proxy)
    first, head = published(world, str(registry.address), 2)
    left, real = 0, collect._delete

    def delete(registry: Registry, digest: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(registry, digest)

    monkeypatch.setattr(collect, "_delete", delete)
    # At first each removal alone, so that every manifest is once the last one that went.
    for number in (*[1] * 6, *range(1, 8)):
        left = number
        plan = plan_sweep(registry, Needs())
        if not plan.going:
            break
        try:
            sweep(registry, plan)
        except KeyboardInterrupt:
            assert [publication.tag for publication in read_index(registry)] == [head.tag]
    assert plan.going == ()
    assert read_manifest(registry, first.oci_digest) is None
    assert not [tag for tag in list_tags(registry) if tag.startswith(first.tag)]
    assert is_whole(registry, head)


def test_a_registry_that_removes_nothing_says_so(proxy: FaultProxy, registry: Registry, world: PublishWorld) -> None:
    published(world, str(registry.address), 2)
    proxy.add(method="DELETE", status=405)
    with pytest.raises(NetworkError, match="does not allow removal") as caught:
        sweep(registry, plan_sweep(registry, Needs()))
    assert "status 405" in caught.value.why
    assert "storage.delete.enabled" in caught.value.fix


def test_referrers_that_a_retention_rule_removed_are_noticed(
    removing: str, repository: str, world: PublishWorld
) -> None:
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    (head,) = published(world, to, 1)
    listed = digest_of_tag(registry, head.oci_digest.replace(":", "-"))
    registry.ask("DELETE", f"manifests/{listed}", accept=(202,))
    assert plan_sweep(registry, Needs()).damaged == (head,)


@pytest.mark.parametrize(
    "way", ["an older index", "attached", "left out", "its docker tag", "its record", "its image", "its tag"]
)
def test_who_may_only_push_has_no_revocation_removed(
    removing: str, repository: str, world: PublishWorld, way: str
) -> None:
    """Listed as a part of what goes: this account may remove, and that one may not."""
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    bad, old, head = published(world, to, 3)
    before = Attacker(registry).index()
    revoke(to, bad.oci_digest, "wrong NCCL", world.context)
    tags = revocation_tags(bad)
    records = [record for tag in tags if (record := read_manifest(registry, tag))]
    attacker = Attacker(registry)
    attacker.write_back(before)
    if way == "attached":
        listed = [{"mediaType": MANIFEST_TYPE, "digest": item.digest, "size": len(item.content)} for item in records]
        document = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed}).encode()
        put_manifest(registry, tag_of(old.oci_digest), RegistryManifest(content=document, media_type=INDEX_TYPE))
    elif way in ("its docker tag", "its record"):
        put_manifest(registry, old.tag + ("-docker" if way == "its docker tag" else "-publication"), records[0])
    elif way == "its image":
        attacker.relist(old, oci_digest=records[0].digest)
    elif way == "its tag":
        attacker.relist(old, tag=tags[0])
    elif way == "left out":
        document = json.loads(before.content)
        document["manifests"] = [entry for entry in document["manifests"] if attacker.tag(entry) != bad.tag]
        document["annotations"] = {LEFT_OUT: bad.tag}
        attacker.write_back(replace(before, content=json.dumps(document).encode()))
    sweep(registry, plan_sweep(registry, Needs()))
    assert all(digest_of_tag(registry, tag) for tag in tags)
    assert refused(world, f"{to}@{bad.oci_digest}").reason == "revoked"
    assert read_manifest(registry, bad.oci_digest) is not None
    assert is_whole(registry, head)


def test_what_is_attached_to_another_image_stays(removing: str, repository: str, world: PublishWorld) -> None:
    """Whoever may push writes the list of what is attached to an image, which no tag names."""
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    old, head = published(world, to, 2)
    listed = read_manifest(registry, tag_of(head.oci_digest))
    assert listed is not None
    put_manifest(registry, tag_of(old.oci_digest), listed)
    sweep(registry, plan_sweep(registry, Needs()))
    assert read_manifest(registry, old.oci_digest) is None
    assert is_whole(registry, head)


def test_an_image_that_another_tag_names_stays(removing: str, repository: str, world: PublishWorld) -> None:
    to, registry = f"{removing}/{repository}", opened(removing, repository)
    first, _ = published(world, to, 2)
    image = read_manifest(registry, first.tag)
    assert image is not None
    put_manifest(registry, "paper-2026", image)
    planned = plan_sweep(registry, Needs())
    assert planned.going == ()
    assert planned.kept[first.tag] == "another tag names its image"
