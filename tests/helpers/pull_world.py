"""Images that were published to a .sqsh store with certificates that a trusted key signed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.notes import Notes
from helpers.publications import make_publication
from helpers.publish_world import PublishWorld

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.certify.certificate.file import open_certificate
from envbuild.certify.certificate.statement import PREDICATE_TYPE
from envbuild.certify.certificate.verify import oldest_measurement
from envbuild.core.digests import sha256_file, short
from envbuild.publish.bundle import make_bundle
from envbuild.publish.models import Publication, PublishedSqsh
from envbuild.publish.pull import PullRequest
from envbuild.publish.signature import sign_publication
from envbuild.publish.sources import Reference
from envbuild.publish.sqsh_stores import SqshStore, open_sqsh_store
from envbuild.store.local import LocalStore


@dataclass
class PullWorld:
    """A .sqsh store, what was published to it, and an account that pulls."""

    world: PublishWorld
    store: SqshStore
    home: Path
    notes: Notes = field(default_factory=Notes)

    @property
    def context(self) -> Context:
        return Context(
            store=LocalStore(self.home / "cache", self.notes),
            site=load_site({"HOME": str(self.home)}),
            reporter=self.notes,
        )

    @property
    def image(self) -> Path:
        return self.world.image.sqsh()

    def served(self, kind: str) -> Path:
        """A file of the store."""
        return next(path for path in (self.home / "share" / kind).rglob("*") if path.is_file())

    def publish(self, *, certified: bool = True, signed: bool = True, **changes: Any) -> Publication:
        """Put the world's image there; ``changes`` are fields of its publication."""
        publication, bundle = self.described(certified=certified, signed=signed, **changes)
        self.store.put(self.image, publication, bundle)
        self.store.move_tag(publication.moving_tag, publication, self.context.clock())
        return publication

    def described(
        self, *, certified: bool = True, signed: bool = True, **changes: Any
    ) -> tuple[Publication, bytes | None]:
        """The publication of the world's image, and the bundle of a new certificate."""
        record = self.world.image.record
        digest = str(record.sqsh_digest)
        fields: dict[str, Any] = {
            "lock_digest": record.lock_digest,
            "oci_digest": record.oci_digest,
            "sqsh": PublishedSqsh(
                digest=digest, size_bytes=self.image.stat().st_size, place=self.store.place_of(digest)
            ),
            "tag": f"mcore-debian12-{short(record.lock_digest)}-cpu",
            "size_bytes": sum(layer.size_bytes for layer in record.layers),
        }
        bundle = None
        if certified:
            file = self.world.certify()
            opened = open_certificate(file)
            statement = opened.statement()
            bundle = make_bundle(opened.content, PREDICATE_TYPE).content
            fields |= {
                "certificate_digest": sha256_file(file),
                "keyid": opened.keyid,
                "certified_at": statement.predicate.issued_at,
                "measured_at": oldest_measurement(statement),
                "published_at": statement.predicate.issued_at,
            }
        else:
            fields |= dict.fromkeys(("certificate_digest", "keyid", "certified_at", "measured_at"))
        publication = make_publication(**(fields | changes))
        return sign_publication(publication, self.world.signer) if certified and signed else publication, bundle

    def request(self, name: str = "mcore-debian12-cpu", **changes: Any) -> PullRequest:
        """A request for a tag or digest; ``changes`` are its fields."""
        reference = Reference(place=self.store.address, name=name)
        return PullRequest(**{"reference": reference, "trust": self.world.trust, **changes})


def make_pull_world(world: PublishWorld, folder: Path) -> PullWorld:
    (folder / "share").mkdir(parents=True)
    site = load_site({"HOME": str(folder)})
    return PullWorld(world, open_sqsh_store(str(folder / "share"), site), folder)
