"""The last step of a night: where the .sqsh goes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from helpers.publish_world import PublishWorld, measured_now
from integration.publish.conftest import Secure

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core.digests import canonical_json
from envbuild.nightly.models import Job, Outcome
from envbuild.nightly.published import publish_job
from envbuild.oci.push import RegistryManifest, put_manifest
from envbuild.oci.referrers import INDEX_TYPE, list_referrers
from envbuild.publish import publish as publish_module
from envbuild.publish.draft import Publishing
from envbuild.publish.index import read_index
from envbuild.publish.moving import NOTHING
from envbuild.publish.publish import publish
from envbuild.publish.sqsh_stores import open_sqsh_store
from envbuild.publish.tags import INDEX_TAG

EMPTY_INDEX = RegistryManifest(
    content=canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}), media_type=INDEX_TYPE
)
SQSH = "application/x-squashfs"


class Night:
    """A night that publishes the world's image."""

    def __init__(self, world: PublishWorld, secure: Secure, repository: str) -> None:
        self.world, self.to, self.registry = world, f"{secure.host}/{repository}", secure.registry(repository)

    def publish(self, **changes: object) -> Outcome:
        world, request = self.world, self.world.request(self.to)
        publishing = Publishing(
            to=self.to,
            policy=request.policy,
            trust=request.trust,
            signer=world.signer,
            **changes,  # type: ignore[arg-type]
        )
        job = Job(selection=world.selection, lock=world.lock, image=world.image, certificate=request.certificate)
        return publish_job(job, publishing, world.context)

    @property
    def sqsh_is_attached(self) -> bool:
        referrers = list_referrers(self.registry, self.world.image.record.oci_digest)
        return SQSH in {referrer.artifact_type for referrer in referrers}


@pytest.fixture
def night(secure: Secure, repository: str, world: PublishWorld) -> Night:
    world.certify()
    return Night(world, secure, repository)


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


def test_the_sqsh_goes_to_the_store_that_a_night_names(night: Night, share: Path) -> None:
    assert night.publish(sqsh_to=str(share)).state == "done"
    assert night.publish(sqsh_to=str(share)).state == "nothing"
    night.world.certify()
    night.publish(sqsh_to=str(share))
    assert not night.sqsh_is_attached


@pytest.mark.slow
def test_a_night_sends_no_sqsh_that_a_store_has(night: Night, share: Path) -> None:
    """It was published by hand, with --sqsh-to, and the night has no such option."""
    world = night.world
    publication = publish(world.request(night.to, sqsh_to=str(share)), world.context).publication
    assert night.publish().state == "nothing"
    assert not night.sqsh_is_attached
    assert read_index(night.registry) == (publication,)
    # Nor with a newer certificate, which the store gets, too.
    world.certify()
    night.publish()
    assert not night.sqsh_is_attached
    (now,) = read_index(night.registry)
    assert open_sqsh_store(str(share), world.context.site).publications() == (now,)


def test_a_night_sends_nothing_to_a_place_that_an_index_names_and_that_lacks_the_sqsh(
    night: Night, share: Path
) -> None:
    world = night.world
    publish(world.request(night.to, sqsh_to=str(share)), world.context)
    (sqsh,) = (share / "sqsh/sha256").iterdir()
    sqsh.unlink()
    night.publish()
    assert night.sqsh_is_attached
    assert not sqsh.exists()


@pytest.mark.parametrize("of", ["an older index", "no index", "a publisher that was killed"])
def test_a_night_finds_the_store_also_by(of: str, night: Night, share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The .sqsh lies in a store, and the index does not say so yet, or says it of an older certificate."""
    world = night.world
    if of == "a publisher that was killed":
        # A certificate of the same second is no newer one.
        minute_ago = (world.context.clock() - timedelta(minutes=1)).strftime(MOMENT_FORMAT)
        world.certify(issued_at=minute_ago, measured=measured_now(started_at=minute_ago, finished_at=minute_ago))
        publish(world.request(night.to, sqsh_to=str(share)), world.context)
        world.certify()
        with monkeypatch.context() as patch:
            patch.setattr(publish_module, "_tag", killed)
            with pytest.raises(KeyboardInterrupt):
                publish(world.request(night.to, sqsh_to=str(share)), world.context)
    else:
        put_manifest(night.registry, INDEX_TAG, EMPTY_INDEX)
        publish(world.request(night.to, sqsh_to=str(share)), world.context)
        put_manifest(night.registry, INDEX_TAG, EMPTY_INDEX if of == "an older index" else NOTHING)
    assert night.publish().state == "done"
    assert not night.sqsh_is_attached
    (now,) = read_index(night.registry)
    assert open_sqsh_store(str(share), world.context.site).publications() == (now,)


def killed(*_: object) -> None:
    raise KeyboardInterrupt
