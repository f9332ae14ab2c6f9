"""What is attached to an image: with the referrers API and without it; and publishers that die at any request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.fault_proxy import Fault, FaultProxy
from helpers.publish_world import PublishWorld
from helpers.referrers_api import ReferrersApi
from integration.publish.conftest import opened

from envbuild.core.errors import NetworkError
from envbuild.oci.artifact import EMPTY_DESCRIPTOR, artifact_manifest
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import digest_of_tag, put_manifest, read_manifest
from envbuild.oci.referrers import INDEX_TYPE, attach, has_api, list_referrers, tag_of
from envbuild.publish.index import read_index
from envbuild.publish.models import Publication
from envbuild.publish.publish import publish
from envbuild.publish.records import PUBLICATION_TYPE
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags


@pytest.mark.parametrize("api", [True, False], ids=["API", "tags"])
def test_what_is_attached_is_listed(proxy: FaultProxy, registry: Registry, world: PublishWorld, api: bool) -> None:
    if api:
        ReferrersApi().put_before(proxy)
    publication = world.publish(str(registry.address))
    assert has_api(registry, publication.oci_digest) is api
    types = {referrer.artifact_type for referrer in list_referrers(registry, publication.oci_digest)}
    assert types >= {
        "application/vnd.cyclonedx+json",
        "application/vnd.dev.sigstore.bundle.v0.3+json",
        "application/x-squashfs",
    }
    assert (tag_of(publication.oci_digest) in list_tags(registry)) is not api
    # Where the API is, docker's manifest is pushed on demand alone.
    assert (publication.docker_digest is None) is api
    assert publish(world.request(str(registry.address)), world.context).nothing_to_do
    with_docker = publish(world.request(str(registry.address), docker_manifest=True), world.context)
    assert with_docker.publication.docker_digest is not None
    assert with_docker.nothing_to_do is not api


@pytest.mark.parametrize("status", [200, 400, 403, 404, 405, 501])
def test_the_api_is_probed(proxy: FaultProxy, registry: Registry, status: int) -> None:
    """Also a server that answers every address with a page has none."""
    proxy.add(method="GET", path="referrers", status=status, body=b"<html>", headers={"Content-Type": "text/html"})
    assert not has_api(registry, f"sha256:{'1' * 64}")


def test_each_page_is_asked_for_once(proxy: FaultProxy, registry: Registry) -> None:
    """Also where the last one links to itself."""

    def page(number: int) -> bytes:
        entry = {"mediaType": MANIFEST_TYPE, "digest": f"sha256:{str(number) * 64}", "size": 1}
        return json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}).encode()

    headers = {"Content-Type": INDEX_TYPE, "Link": '</v2/x/referrers/y?page=2>; rel="next"'}
    for path, number in (("page=2", 2), ("referrers", 1)):
        proxy.add(method="GET", path=path, status=200, headers=headers, body=page(number))
    listed = list_referrers(registry, f"sha256:{'0' * 64}")
    assert [referrer.digest[-1] for referrer in listed] == ["1", "2"]
    assert proxy.count("GET", "referrers") == 2


def test_an_entry_that_another_writer_replaced_is_put_back(
    proxy: FaultProxy, registry: Registry, world: PublishWorld
) -> None:
    """Of the tag's index: another publisher read it earlier, and writes after us what it made of that."""
    publication = world.publish(str(registry.address))
    tag, before = tag_of(publication.oci_digest), list_referrers(registry, publication.oci_digest)
    stale = read_manifest(registry, tag)
    assert stale is not None
    looks = 0

    def meanwhile() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the look after our own write
            put_manifest(registry, tag, stale)

    proxy.add(method="GET", path=f"manifests/{tag}", hold=meanwhile)
    subject = {"mediaType": MANIFEST_TYPE, "digest": publication.oci_digest, "size": 1}
    own = artifact_manifest("application/x-own", EMPTY_DESCRIPTOR, subject, {})
    attach(registry, {"application/x-own": [own]}, publication.oci_digest)
    after = list_referrers(registry, publication.oci_digest)
    assert {referrer.artifact_type for referrer in after} == {referrer.artifact_type for referrer in before} | {
        "application/x-own"
    }
    assert proxy.count("PUT", f"manifests/{tag}") >= 3


def test_what_a_retention_rule_removed_is_listed_no_more(registry: Registry, world: PublishWorld) -> None:
    """The registry would never take the tag's index again: it refuses one of what is not there."""
    publication = world.publish(str(registry.address))
    (gone, *kept) = list_referrers(registry, publication.oci_digest)
    registry.ask("DELETE", f"manifests/{gone.digest}", accept=(202,))
    subject = {"mediaType": MANIFEST_TYPE, "digest": publication.oci_digest, "size": 1}
    own = artifact_manifest("application/x-own", EMPTY_DESCRIPTOR, subject, {})
    attach(registry, {"application/x-own": [own]}, publication.oci_digest)
    types = {referrer.artifact_type for referrer in list_referrers(registry, publication.oci_digest)}
    assert types == {referrer.artifact_type for referrer in kept} | {"application/x-own"}


def _complete(registry: Registry, tag: str) -> None:
    """What a tag names, if anything, is there with every blob and what is attached to it."""
    manifest = read_manifest(registry, tag)
    if manifest is None:
        return
    document = json.loads(manifest.content)
    for blob in (document["config"], *document["layers"]):
        registry.ask("HEAD", f"blobs/{blob['digest']}", accept=(200,))
    if not tag.endswith("-docker"):
        # Where a registry has the API, the record of the publication is one of them.
        listed = [
            referrer
            for referrer in list_referrers(registry, manifest.digest)
            if referrer.artifact_type != PUBLICATION_TYPE
        ]
        assert len(listed) == 4


@pytest.mark.slow
def test_publishers_that_die_at_any_request_leave_nothing_incomplete(
    open_registry: str, proxy: FaultProxy, registry: Registry, world: PublishWorld
) -> None:
    """The registry is gone from some request on, at a later one each time; the last run goes through."""
    direct = opened(open_registry.removeprefix("http://"), registry.address.path)
    first = world.publish(str(registry.address))
    world.renew()
    world.certify()
    gone = Fault(status=500)
    left, seen = 0, 0

    def dying(method: str, path: str) -> Fault | None:
        nonlocal seen
        seen += 1
        return gone if seen > left else None

    proxy.fault_for = dying  # type: ignore[method-assign]
    runs, second = 0, None
    while second is None:
        left, seen, runs = left + 3, 0, runs + 1
        try:
            second = publish(world.request(str(registry.address)), world.context).publication
        except NetworkError:
            for tag in list_tags(direct):
                if tag.startswith("mcore-") and not tag.endswith("-publication"):
                    _complete(direct, tag)
            listed = read_index(direct)
            assert listed[0] == first
            for entry in listed:
                _complete(direct, entry.tag)
    assert runs > 4
    assert read_index(direct) == (first, second)
    _complete(direct, second.moving_tag)
    assert digest_of_tag(direct, second.moving_tag) == world.image.record.oci_digest
    assert isinstance(second, Publication)


@pytest.mark.slow
def test_writers_at_the_same_moment(proxy: FaultProxy, registry: Registry, world: PublishWorld) -> None:
    """One image, five publishers."""
    world.certify()
    with ThreadPoolExecutor(5) as pool:
        done = list(pool.map(lambda _: publish(world.request(str(registry.address)), world.context), range(5)))
    assert len({each.publication.tag for each in done}) == 1
    (listed,) = read_index(registry)
    assert listed.oci_digest == world.image.record.oci_digest
    _complete(registry, listed.moving_tag)
