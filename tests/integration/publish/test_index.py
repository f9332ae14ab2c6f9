"""The index of a repository where somebody spoils it, and where tags are changed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.publish_world import PublishWorld

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.oci.push import RegistryManifest, digest_of_tag, put_manifest, read_manifest
from envbuild.oci.referrers import INDEX_TYPE, list_referrers
from envbuild.publish import index
from envbuild.publish.index import read_index, record
from envbuild.publish.models import Publication
from envbuild.publish.moving import NOTHING, move_tag
from envbuild.publish.publish import publish
from envbuild.publish.records import PUBLICATION
from envbuild.publish.revoke import revoke
from envbuild.publish.tags import INDEX_TAG
from envbuild.store.registry import Registry


@pytest.fixture
def published(registry: Registry, world: PublishWorld) -> Publication:
    world.certify()
    return publish(world.request(str(registry.address)), world.context).publication


def spoil(registry: Registry, change: Callable[[Any], object]) -> None:
    """Put another index there."""
    manifest = read_manifest(registry, INDEX_TAG)
    assert manifest is not None
    document = json.loads(manifest.content)
    change(document)
    put_manifest(registry, INDEX_TAG, RegistryManifest(content=json.dumps(document).encode(), media_type=INDEX_TYPE))


def with_publication(**changes: object) -> Callable[[Any], object]:
    """Changes the JSON of the first publication."""

    def change(document: Any) -> None:
        annotations = document["manifests"][0]["annotations"]
        annotations[PUBLICATION] = json.dumps(json.loads(annotations[PUBLICATION]) | changes)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(with_publication(oci_digest=sha256_bytes(b"another")), id="another image"),
        *(
            pytest.param(change, id=what, marks=pytest.mark.slow)
            for what, change in (
                ("no publication", lambda document: document["manifests"][0]["annotations"].pop(PUBLICATION)),
                ("no list", lambda document: document.pop("manifests")),
            )
        ),
    ],
)
def test_a_tampered_index_is_written_anew(
    proxy: FaultProxy,
    registry: Registry,
    world: PublishWorld,
    published: Publication,
    change: Callable[[Any], object],
) -> None:
    """From the publications' own tags; who may not list these is told what is wrong."""
    world.renew()
    newer = world.publish(str(registry.address))
    revoke(str(registry.address), published.oci_digest, "wrong NCCL", world.context)
    # What tells of a revocation is spoiled, too.
    put_manifest(registry, f"{published.tag}-revoked", NOTHING)
    spoil(registry, change)
    forbidden = proxy.add(method="GET", path="tags/list", status=403)
    with pytest.raises(CheckRefusedError) as caught:
        read_index(registry)
    assert f"index of {registry.address}" in caught.value.what
    assert "may list tags" in caught.value.fix
    proxy.faults.remove(forbidden)
    assert [(publication.tag, bool(publication.revoked)) for publication in read_index(registry)] == [
        (published.tag, True),
        (newer.tag, False),
    ]
    assert not publish(world.request(str(registry.address)), world.context).nothing_to_do
    assert digest_of_tag(registry, newer.moving_tag) == newer.oci_digest
    proxy.add(method="GET", path="tags/list", status=403)
    assert {publication.tag for publication in read_index(registry)} == {published.tag, newer.tag}


def test_a_truncated_index_is_asked_for_again(proxy: FaultProxy, registry: Registry, published: Publication) -> None:
    proxy.add(method="GET", path=INDEX_TAG, times=1, cut_after=50)
    assert read_index(registry) == (published,)
    proxy.add(method="GET", path=INDEX_TAG, times=1, keep=50)
    with pytest.raises(NetworkError, match="something else"):
        read_index(registry)


def test_one_request_answers_what_is_there(proxy: FaultProxy, registry: Registry, published: Publication) -> None:
    before = len(proxy.requests)
    assert read_index(registry) == (published,)
    assert len(proxy.requests) == before + 1


def test_nothing_to_do_costs_a_few_requests(
    proxy: FaultProxy, registry: Registry, world: PublishWorld, published: Publication
) -> None:
    before = len(proxy.requests)
    assert publish(world.request(str(registry.address)), world.context).nothing_to_do
    # Each blob is looked at: a rule of the registry may have removed one.
    assert len([path for _, path, _ in proxy.requests[before:] if "/blobs/" not in path]) <= 16
    assert all(method in ("GET", "HEAD") for method, _, _ in proxy.requests[before:])


def test_what_a_retention_rule_removed_is_listed_no_more(
    registry: Registry, world: PublishWorld, published: Publication
) -> None:
    """The registry takes no index that names it: without this nothing would be published there ever again."""
    registry.ask("DELETE", f"manifests/{published.oci_digest}", accept=(202,))
    world.renew()
    newer = world.publish(str(registry.address))
    assert read_index(registry) == (newer,)
    assert digest_of_tag(registry, newer.moving_tag) == newer.oci_digest
    assert any(published.tag in note for note in world.notes.lines)


def test_what_is_not_there_is_not_listed(registry: Registry, published: Publication) -> None:
    gone = published.model_copy(update={"tag": f"{published.tag}-2", "oci_digest": sha256_bytes(b"gone")})
    with pytest.raises(NetworkError):
        record(registry, gone, 1000)
    assert read_index(registry) == (published,)


def test_a_referrer_that_a_retention_rule_removed_is_pushed_again(
    registry: Registry, world: PublishWorld, published: Publication
) -> None:
    before = list_referrers(registry, published.oci_digest)
    registry.ask("DELETE", f"manifests/{before[0].digest}", accept=(202,))
    assert not publish(world.request(str(registry.address)), world.context).nothing_to_do
    for referrer in list_referrers(registry, published.oci_digest):
        assert read_manifest(registry, referrer.digest) is not None


@pytest.mark.slow
def test_a_moving_tag_that_another_program_sets_back_is_put_right(
    registry: Registry, world: PublishWorld, published: Publication
) -> None:
    world.renew()
    newer = world.publish(str(registry.address))
    older = read_manifest(registry, published.oci_digest)
    assert older is not None
    put_manifest(registry, published.moving_tag, older)
    assert publish(world.request(str(registry.address)), world.context).nothing_to_do
    assert digest_of_tag(registry, published.moving_tag) == newer.oci_digest


@pytest.mark.slow
def test_a_tag_that_is_changed_between_look_and_write(
    proxy: FaultProxy, registry: Registry, world: PublishWorld, published: Publication
) -> None:
    """An older publisher writes the moving tag late: it looks again, and puts the newer image back."""
    put_manifest(registry, published.moving_tag, NOTHING)
    world.renew()
    world.certify()
    newer = []

    def meanwhile() -> None:
        newer.append(publish(world.request(str(registry.address)), world.context).publication)

    late = proxy.add(method="PUT", path=f"manifests/{published.moving_tag}", times=1, hold=meanwhile)
    assert move_tag(registry, published.moving_tag) == newer[0]
    assert late.seen == 1
    assert digest_of_tag(registry, published.moving_tag) == newer[0].oci_digest != published.oci_digest


@pytest.mark.slow
def test_the_index_stays_below_what_registries_take(
    registry: Registry, published: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are left out; what a moving tag names never is."""
    monkeypatch.setattr(index, "MOST_BYTES", 8000)
    stable = published.model_copy(update={"tag": "old", "moving_tag": "stable"})
    record(registry, stable, 1000)
    for number in range(1, 8):
        moment = f"2098-01-01T00:00:0{number}Z"
        record(registry, published.model_copy(update={"tag": f"t{number}", "published_at": moment}), 1000)
    tags = [publication.tag for publication in read_index(registry)]
    manifest = read_manifest(registry, INDEX_TAG)
    assert manifest is not None
    assert len(manifest.content) <= 8000
    assert {"old", "t7"} <= set(tags)
    assert "t1" not in tags
    assert move_tag(registry, "stable") == stable
