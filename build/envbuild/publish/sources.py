"""Sources of published images: a repository of a registry, or a .sqsh store; and how references are written.

``REGISTRY/REPO:TAG``, ``s3://BUCKET/PREFIX:TAG``, ``gs://...``, ``/DIRECTORY:TAG``; ``@sha256:...`` in place of a tag,
or after it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from envbuild.catalog.site import Site
from envbuild.certify.certificate.envelope import LARGEST_BYTES
from envbuild.core.digests import is_digest, sha256_bytes
from envbuild.core.errors import CertificateRefusedError, CheckRefusedError, UsageError
from envbuild.core.exit_status import mask
from envbuild.core.files import machine_errors
from envbuild.oci.models import Manifest, not_of_envbuild, read
from envbuild.oci.push import read_manifest
from envbuild.oci.referrers import list_referrers
from envbuild.publish.bundle import BUNDLE_TYPE, certificate_in
from envbuild.publish.index import head_of, read_all, read_index
from envbuild.publish.models import TAG_PATTERN, Publication, PublishedSqsh, Revocation
from envbuild.publish.records import revocation_of
from envbuild.publish.repository import open_repository
from envbuild.publish.sqsh_stores import SqshStore, open_sqsh_store, store_of
from envbuild.store.address import BUCKET_PREFIXES
from envbuild.store.address import FORMS as SCHEMES
from envbuild.store.registry import Registry
from envbuild.store.tags import Bounded

FORMS = "REGISTRY/REPO:TAG, s3://BUCKET/PREFIX:TAG, gs://BUCKET/PREFIX:TAG or /DIRECTORY:TAG; or @sha256:... for :TAG"
# A tag cannot have a slash, so that the port of a registry is none.
_REFERENCE = re.compile(r"(?P<place>.+?)(:(?P<tag>[^/:@]+))?(@(?P<digest>sha256:[0-9a-f]{64}))?", re.DOTALL)
# enroot's form of a registry's image: docker://[USER@][REGISTRY#]IMAGE[:TAG].
_ENROOT = re.compile(r"docker://([^@#/]+@)?(?P<registry>[^#]+)#(?P<image>.+)")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A parsed reference.

    Attributes:
        place: a repository or a .sqsh store.
        name: a tag, or a digest.
    """

    place: str
    name: str

    @property
    def is_digest(self) -> bool:
        return self.name.startswith("sha256:")

    def __str__(self) -> str:
        return f"{self.place}{'@' if self.is_digest else ':'}{self.name}"


def parse_reference(text: str) -> Reference:
    """Parse a reference.

    Raises:
        UsageError: it has neither a tag nor a digest, or no place.
    """
    enroot = _ENROOT.fullmatch(text)
    # pyxis puts docker:// before whatever is no path.
    plain = f"{enroot['registry']}/{enroot['image']}" if enroot else text.removeprefix("docker://")
    match = _REFERENCE.fullmatch(plain)
    place, name = (match["place"], match["digest"] or match["tag"]) if match else ("", "")
    # s3://BUCKET/PREFIX/TAG: buckets have no ports, so that what follows the last slash may be the tag.
    if not name and place.startswith(BUCKET_PREFIXES) and place.count("/") > 2:
        place, _, name = place.rpartition("/")
    scheme = place.partition("://")[0] if "://" in place else "oci"
    # Without a slash it is one of docker's short names (ubuntu:24.04), whose registry it does not say.
    if not name or not re.match(rf"{TAG_PATTERN}|^sha256:", name) or "/" not in place or scheme not in SCHEMES:
        raise UsageError(
            f"{mask(text)!r} names no published image",
            why=f"It is none of: {FORMS}.",
            fix="Name the place and a tag or a digest; `envbuild status` lists what the ledger has.",
        )
    return Reference(place=place, name=name)


class Source(Protocol):
    """A place with published images. All methods raise NetworkError where it cannot be reached or refuses."""

    @property
    def address(self) -> str:
        """Its address, for people."""

    def publications(self) -> tuple[Publication, ...]:
        """Everything that is published there."""

    def find(self, name: str, at: datetime) -> Publication | None:
        """The publication of a tag or digest at a moment, with its revocation; None if there is none."""

    def certificate(self, publication: Publication) -> bytes | None:
        """The file of its certificate, unchecked; None when it is not there."""

    def download_sqsh(self, sqsh: PublishedSqsh, to: Path, start: int) -> bool:
        """Write a .sqsh, or what follows its first ``start`` bytes to the end of a file; False: it is not there."""


@dataclass(frozen=True)
class StoreSource:
    """A .sqsh store."""

    store: SqshStore

    @property
    def address(self) -> str:
        return self.store.address

    def publications(self) -> tuple[Publication, ...]:
        return self.store.publications()

    def find(self, name: str, at: datetime) -> Publication | None:
        publication = self.store.find(name)
        if publication is None:
            return None
        publication = with_revocation(publication, self.store.revocation(publication))
        if publication.revoked is None or name != publication.moving_tag:
            return publication
        # The tag was not moved back yet.
        return newest_of(self.store.publications(), name, at, self.store.revocation) or publication

    def certificate(self, publication: Publication) -> bytes | None:
        bundle = self.store.bundle(publication)
        return None if bundle is None else certificate_in(bundle, f"the .sqsh store {self.address}")

    def download_sqsh(self, sqsh: PublishedSqsh, to: Path, start: int) -> bool:
        return self.store.download(sqsh, to, start)


@dataclass(frozen=True)
class RepositorySource:
    """A repository of a registry; its .sqsh files may lie in a store."""

    registry: Registry
    site: Site

    @property
    def address(self) -> str:
        return str(self.registry.address)

    def publications(self) -> tuple[Publication, ...]:
        return read_index(self.registry)

    def find(self, name: str, at: datetime) -> Publication | None:
        # Of a digest there is one publication, whatever came after it.
        publications = self.publications() if is_digest(name) else ()
        # An older index may have been put back.
        if not any(name in publication.digests for publication in publications):
            publications = read_all(self.registry)
        # By its image: it may be listed under another tag, too.
        listed = {publication.oci_digest: publication.revoked for publication in publications if publication.revoked}

        bounded = Bounded(self.registry, f"the list of what was revoked under {name}")

        def revocation(publication: Publication) -> Revocation | None:
            bounded.count()
            return listed.get(publication.oci_digest) or revocation_of(self.registry, publication)

        if any(publication.moving_tag == name for publication in publications):
            return newest_of(publications, name, at, revocation)
        fitting = [
            publication for publication in publications if name == publication.tag or name in publication.digests
        ]
        newest = max(fitting, key=lambda publication: publication.published_at, default=None)
        return None if newest is None else with_revocation(newest, revocation(newest))

    def certificate(self, publication: Publication) -> bytes | None:
        refused: CertificateRefusedError | None = None
        for bundle in self._bundles(publication.oci_digest):
            try:
                content = certificate_in(bundle, self.address)
            except CertificateRefusedError as error:
                # Another program's, such as cosign's; or the certificate's, damaged, where no other one has it.
                refused = refused or error
                continue
            # The test result is a bundle of the same type, and so are older certificates of this image.
            if sha256_bytes(content) == publication.certificate_digest:
                return content
        if refused is not None and publication.certificate_digest is not None:
            raise refused
        return None

    def download_sqsh(self, sqsh: PublishedSqsh, to: Path, start: int) -> bool:
        if sqsh.place:
            return store_of(sqsh.place, self.site).download(sqsh, to, start)
        return self.registry.download(f"blobs/{sqsh.digest}", sqsh.size_bytes, to, start=start)

    def _bundles(self, digest: str) -> Iterator[bytes]:
        """The bundles that are attached to an image, whoever wrote them."""
        bounded = Bounded(self.registry, f"what is attached to {digest}")
        for referrer in list_referrers(self.registry, digest):
            # A list may lack the types: what has none is looked at.
            if referrer.artifact_type not in ("", None, BUNDLE_TYPE):
                continue
            artifact = read_manifest(self.registry, referrer.digest)
            bounded.count()
            if artifact is None:
                continue
            manifest = read(artifact.content, Manifest, f"an artifact of {self.address}", not_of_envbuild)
            for layer in manifest.layers:
                if layer.media_type == BUNDLE_TYPE and layer.size_bytes <= LARGEST_BYTES * 2:
                    bounded.count(layer.size_bytes)
                    yield self._blob(layer.digest, layer.size_bytes)

    def _blob(self, digest: str, size_bytes: int) -> bytes:
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            file = Path(folder) / "blob"
            there = self.registry.download(f"blobs/{digest}", size_bytes, file)
            with machine_errors(file, "read"):
                content = file.read_bytes() if there else b""
        if sha256_bytes(content) != digest:
            raise CheckRefusedError(
                f"{digest} of {self.address} is refused",
                why="The registry sends other bytes under this digest, or none.",
                fix="Publish the image again; retention rules must spare what refers to a kept image.",
            )
        return content


def with_revocation(publication: Publication, revocation: Revocation | None) -> Publication:
    """The publication as it is: whoever wrote what it comes from may have left out that it was taken back."""
    return publication if revocation is None else publication.model_copy(update={"revoked": revocation})


def newest_of(
    publications: Iterable[Publication],
    moving_tag: str,
    at: datetime,
    revocation: Callable[[Publication], Revocation | None],
) -> Publication | None:
    """The newest publication of a moving tag that was not taken back; where all were, the newest, which says why."""
    waiting = {publication.tag: publication for publication in publications if publication.moving_tag == moving_tag}
    while head := head_of(waiting.values(), moving_tag, at):
        waiting[head.tag] = with_revocation(head, revocation(head))
        if waiting[head.tag].revoked is None:
            return head
    return max(waiting.values(), key=lambda publication: publication.published_at, default=None)


def open_source(place: str, site: Site) -> Source:
    """The repository or the .sqsh store at a place. Nothing is asked of it yet.

    Raises:
        ConfigurationError: its address is malformed.
    """
    # A registry's host begins with none of these, so docker's form needs no scheme.
    if place.startswith((*BUCKET_PREFIXES, "file://", "/", "./", "../", "~")):
        return StoreSource(open_sqsh_store(place, site))
    return RepositorySource(open_repository(place, site), site)
