"""What goes from a repository, and what stays with all that refers to it."""

from __future__ import annotations

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.locks import MAIN
from helpers.publish_world import PublishWorld
from helpers.referrers_api import ReferrersApi
from integration.publish.conftest import opened

from envbuild.core.errors import NetworkError
from envbuild.oci.push import digest_of_tag, read_manifest
from envbuild.oci.referrers import list_referrers
from envbuild.publish import collect
from envbuild.publish.collect import Needs, plan_sweep, sweep
from envbuild.publish.index import read_index
from envbuild.publish.models import Publication
from envbuild.publish.revoke import revoke
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
    sweep(registry, planned.going)
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
        going = plan_sweep(registry, Needs()).going
        if not going:
            break
        try:
            sweep(registry, going)
        except KeyboardInterrupt:
            assert [publication.tag for publication in read_index(registry)] == [head.tag]
    assert going == ()
    assert read_manifest(registry, first.oci_digest) is None
    assert not [tag for tag in list_tags(registry) if tag.startswith(first.tag)]
    assert is_whole(registry, head)


def test_a_registry_that_removes_nothing_says_so(proxy: FaultProxy, registry: Registry, world: PublishWorld) -> None:
    published(world, str(registry.address), 2)
    proxy.add(method="DELETE", status=405)
    with pytest.raises(NetworkError, match="does not allow removal") as caught:
        sweep(registry, plan_sweep(registry, Needs()).going)
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
