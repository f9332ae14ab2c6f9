"""Stores of .sqsh files: a bucket, or a directory of a shared file system.

| path | holds |
|---|---|
| ``sqsh/sha256/HEX.sqsh`` | a .sqsh by its digest |
| ``certificates/sha256/HEX.json`` | the bundle of a certificate, by the digest of the certificate's file |
| ``publications/TAG/HEX.json`` | the publication of an image, by its immutable tag and the OCI digest |
| ``names/sha256/HEX.json`` | which publication a .sqsh belongs to |
| ``tags/TAG.json`` | which publication a tag means |
| ``revoked/sha256/HEX.json`` | that the image of an OCI digest was taken back, whatever else is there |

A document is written last, by a conditional write, so that what it names is there, and that two publishers lose none of
each other's. It is believed by no reader: the certificate is signed, and the .sqsh is held to its digest.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from envbuild.catalog.context import utc_now
from envbuild.catalog.fields import TomlModel, moment_of
from envbuild.catalog.site import Site
from envbuild.certify.certificate.statement import CLOCK_SKEW, is_after
from envbuild.core.digests import canonical_json, hex_of, is_digest, sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError, NetworkError, PublicationRefusedError
from envbuild.core.files import NotPlainFileError, machine_errors
from envbuild.core.validation import describe_errors
from envbuild.publish.models import (
    TAG_PATTERN,
    Publication,
    PublishedSqsh,
    Revocation,
    read_publication,
    unreadable_revocation,
)
from envbuild.store.address import parse_address
from envbuild.store.backend import ObjectStore, StoredObject
from envbuild.store.conditional import change
from envbuild.store.connect import open_object_store
from envbuild.store.registry_errors import Wording
from envbuild.store.tags import MOST_SECONDS

FILES, NAMES, CERTIFICATES = "sqsh/sha256", "names/sha256", "certificates/sha256"
PUBLICATIONS, TAGS, REVOKED = "publications", "tags", "revoked/sha256"
SUFFIX = ".sqsh"
WORDING = Wording(noun=".sqsh store")
# A publication has some 2 kB, a bundle some 200 kB.
MOST_BYTES = 64 << 20
_PLACE = re.compile(rf"(.+)/{FILES}/([0-9a-f]{{64}})\{SUFFIX}")


class Pointer(TomlModel):
    """The document of a name: the path of a publication in the same store."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: Literal["envbuild.pointer/1"] = Field(alias="schema", default="envbuild.pointer/1")
    publication: Annotated[
        str, StringConstraints(pattern=rf"^{PUBLICATIONS}/[a-zA-Z0-9_][a-zA-Z0-9._-]{{0,127}}/[0-9a-f]{{64}}\.json$")
    ]

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json", by_alias=True))


@dataclass(frozen=True, kw_only=True)
class SqshStore:
    """A store of .sqsh files. All methods raise NetworkError where it cannot be reached or refuses."""

    address: str
    objects: ObjectStore

    def place_of(self, digest: str) -> str:
        """The address of a .sqsh there, which its publication states before it is put."""
        return f"{self.address}/{FILES}/{hex_of(digest)}{SUFFIX}"

    def put(self, file: Path, publication: Publication, bundle: bytes | None, at: datetime | None = None) -> str:
        """Put an image there under its immutable tag: the .sqsh, the certificate's bundle, the publication.

        What is there is not sent again. The address of the .sqsh.

        Args:
            at: now. A document of the image from after it does not stay.

        Raises:
            CheckRefusedError: the file is not the one that the publication states.
            PublicationRefusedError: the tag is another image's.
        """
        sqsh = publication.sqsh
        certificate = publication.certificate_digest
        if sqsh is None or sqsh.place != self.place_of(sqsh.digest) or (certificate is None) != (bundle is None):
            raise ValueError("the publication names no .sqsh of this store, or no certificate for the bundle")
        self._refuse_taken_tag(publication)
        path = f"{FILES}/{hex_of(sqsh.digest)}{SUFFIX}"
        # By its size alone: to hash what is there is to fetch it. Readers hold it to its digest.
        if self.objects.size(path) != sqsh.size_bytes:
            with machine_errors(file, "read"):
                if file.stat().st_size != sqsh.size_bytes or sha256_file(file) != sqsh.digest:
                    raise CheckRefusedError(
                        f"{file} is not put into the .sqsh store {self.address}",
                        why=f"It is not the file of digest {sqsh.digest} any more: it was changed since.",
                        fix="Build the image again: envbuild image.",
                    )
            self.objects.upload(file, path, sqsh.size_bytes)
        if certificate is not None and bundle is not None:
            self._change(f"{CERTIFICATES}/{hex_of(certificate)}.json", bundle, lambda _: bundle)
        document = document_of(publication)
        # After its files and before the names that lead to it: a killed publisher leaves no name that leads nowhere.
        self._change(document, publication.canonical(), lambda there: _newer(there, publication, at or utc_now()))
        pointer = Pointer(publication=document).canonical()
        self._change(f"{NAMES}/{hex_of(sqsh.digest)}.json", pointer, lambda _: pointer)
        self._change(f"{TAGS}/{publication.tag}.json", pointer, lambda _: pointer)
        return sqsh.place

    def has(self, publication: Publication) -> bool:
        """Whether a publication is all there: nobody, and no rule of the store, removed a part of it."""
        if publication.sqsh is None:
            return True
        return (
            self._published_as(publication.tag) == publication
            and self.has_file(publication.sqsh)
            and (publication.certificate_digest is None or self.bundle(publication) is not None)
        )

    def has_image(self, publication: Publication) -> bool:
        """Whether the image of a publication is there with its .sqsh, be it with another certificate."""
        sqsh, stored = publication.sqsh, self._published_as(publication.tag)
        same = stored is not None and stored.is_of_same_image(publication) and stored.sqsh == sqsh
        return same and sqsh is not None and self.has_file(sqsh)

    def _published_as(self, tag: str) -> Publication | None:
        """The publication of a tag; None also if it is damaged, since it is then written anew."""
        try:
            return self.find(tag)
        except CheckRefusedError:
            return None

    def has_file(self, sqsh: PublishedSqsh) -> bool:
        """Whether a .sqsh is there; by its size, since to hash it is to fetch it."""
        return self.objects.size(f"{FILES}/{hex_of(sqsh.digest)}{SUFFIX}") == sqsh.size_bytes

    def move_tag(self, tag: str, publication: Publication, at: datetime) -> bool:
        """Let a moving tag mean a publication that was put there; False: it means a newer one, and stays.

        Args:
            at: now. A publication from after it has a wrong clock, and holds nobody back.
        """
        pointer, kept = Pointer(publication=document_of(publication)).canonical(), False

        def moved(there: bytes) -> bytes:
            nonlocal kept
            try:
                now = self._followed(there, tag)
            except CheckRefusedError:  # what it means is damaged or gone
                now = None
            mine = moment_of(publication.published_at)
            kept = now is not None and not now.revoked and mine < moment_of(now.published_at) <= at + CLOCK_SKEW
            return there if kept else pointer

        self._change(f"{TAGS}/{tag}.json", pointer, moved)
        return not kept

    def revoke(self, digest: str, revocation: Revocation) -> Publication | None:
        """Take a publication back: readers refuse it from now on. None when nothing of this digest is there.

        Args:
            digest: of the OCI image.
        """
        # First, and next to the document, which a publisher or somebody else may write anew, or have damaged.
        self._change(self._revoked_path(digest), revocation.model_dump_json().encode(), lambda there: there)
        stored = self.find(digest)
        if stored is None:
            return None
        path = document_of(stored)

        def revoked(there: bytes) -> bytes:
            known = read_publication(there, self._name(path))
            return (known if known.revoked else known.model_copy(update={"revoked": revocation})).canonical()

        return read_publication(self._change(path, stored.canonical(), revoked), self._name(path))

    def revocation(self, publication: Publication) -> Revocation | None:
        """Why a publication was taken back, by its document or next to it; None where it was not."""
        if publication.revoked is not None:
            return publication.revoked
        there = self._read(self._revoked_path(publication.oci_digest))
        if there is None:
            return None
        try:
            return Revocation.model_validate_json(there.content, strict=True)
        except ValidationError:
            return unreadable_revocation(publication)

    def find(self, reference: str) -> Publication | None:
        """The publication of a tag or of a digest (of the OCI image or the .sqsh); None if there is none.

        Raises:
            CheckRefusedError: it is damaged.
        """
        if not is_digest(reference):
            # It becomes a path: only what can be a tag is read.
            there = self._read(f"{TAGS}/{reference}.json") if re.fullmatch(TAG_PATTERN, reference) else None
            return None if there is None else self._followed(there.content, reference)
        name = self._read(f"{NAMES}/{hex_of(reference)}.json")
        if name is not None:
            stored = self._followed(name.content, reference)
            if stored.sqsh is None or stored.sqsh.digest != reference:
                raise self._damaged(
                    f"{NAMES}/{hex_of(reference)}.json", "It leads to the publication of another .sqsh."
                )
            return stored
        # No name leads from the OCI digest: it stands in the path, below a tag that is not known here.
        ending = f"/{hex_of(reference)}.json"
        path = next((path for path in self.objects.names(PUBLICATIONS) if path.endswith(ending)), None)
        return None if path is None else self._publication(path)

    def publications(self) -> tuple[Publication, ...]:
        """Everything that is published there."""
        started, read = time.monotonic(), list[Publication]()
        for path in sorted(self.objects.names(PUBLICATIONS)):
            if time.monotonic() - started > MOST_SECONDS:
                raise NetworkError(
                    f"the .sqsh store {self.address} has too many publications",
                    why=f"{len(read)} were read in {MOST_SECONDS:.0f} s, and there are more.",
                    fix=f"Find out who writes below {PUBLICATIONS}/ there, and remove what nobody needs.",
                )
            read.append(self._publication(path))
        return tuple(read)

    def bundle(self, publication: Publication) -> bytes | None:
        """The bundle of a publication's certificate; None where it has none, or it is not there."""
        if publication.certificate_digest is None:
            return None
        content = self._read(f"{CERTIFICATES}/{hex_of(publication.certificate_digest)}.json")
        return None if content is None else content.content

    def download(self, sqsh: PublishedSqsh, to: Path, start: int = 0) -> bool:
        """Write a .sqsh to a file, or what follows its first ``start`` bytes to the end of that file.

        What came is for the caller to check. False when it is not there.
        """
        path = f"{FILES}/{hex_of(sqsh.digest)}{SUFFIX}"
        with self._plain_file(path):
            return self.objects.download(path, sqsh.size_bytes, to, start)

    def _refuse_taken_tag(self, publication: Publication) -> None:
        there = self._published_as(publication.tag)
        if there is not None and there.revoked is None and there.oci_digest != publication.oci_digest:
            raise PublicationRefusedError(
                f"{publication.tag} is another image in the .sqsh store {self.address}",
                why=f"It is {there.oci_digest}, published {there.published_at}; this one is {publication.oci_digest}. "
                "An immutable tag stays with its image.",
                fix="Use the image that is there, or take it back: "
                f"envbuild publish --to REGISTRY/REPO --revoke {there.oci_digest} --reason TEXT.",
            )

    def _revoked_path(self, oci_digest: str) -> str:
        return f"{REVOKED}/{hex_of(oci_digest)}.json"

    def _change(self, path: str, new: bytes, changed: Callable[[bytes], bytes]) -> bytes:
        with self._plain_file(path):
            return change(self.objects, path, new, changed, at_most_bytes=MOST_BYTES)

    def _followed(self, pointer: bytes, name: str) -> Publication:
        try:
            path = Pointer.model_validate_json(pointer, strict=True).publication
        except ValidationError as error:
            raise self._damaged(name, f"Its pointer cannot be read: {describe_errors(error)}.") from error
        return self._publication(path)

    def _publication(self, path: str) -> Publication:
        content = self._read(path)
        if content is None:
            raise self._damaged(path, "It is not there.")
        publication = read_publication(content.content, self._name(path))
        if document_of(publication) != path:
            raise self._damaged(path, f"It is the publication of {publication.tag}, {publication.oci_digest}.")
        return publication

    def _read(self, path: str) -> StoredObject | None:
        with self._plain_file(path):
            return self.objects.read(path, MOST_BYTES)

    @contextlib.contextmanager
    def _plain_file(self, path: str) -> Iterator[None]:
        """Refuse what is neither a file nor missing, such as a link in a directory that others write to."""
        try:
            yield
        except NotPlainFileError as error:
            raise self._damaged(path, f"{error}.") from error

    def _name(self, path: str) -> str:
        return f"{path} of the .sqsh store {self.address}"

    def _damaged(self, path: str, why: str) -> CheckRefusedError:
        return CheckRefusedError(
            f"{self._name(path)} is refused",
            why=why,
            fix="Remove it there, and publish the image again: what is whole is not sent again.",
        )


def open_sqsh_store(text: str, site: Site) -> SqshStore:
    """The store at an address: ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX``, ``file:///DIRECTORY`` or a directory.

    A store of the configuration may be named, too; its endpoint is that of all addresses in its bucket.

    Raises:
        ConfigurationError: it is no such address.
    """
    if text in site.known_stores:
        text = site.known_stores[text].url
    address = parse_address(text if "://" in text else Path(text).expanduser().absolute().as_uri())
    endpoints = [
        known.endpoint
        for known in site.known_stores.values()
        if (other := parse_address(known.url)).scheme == address.scheme and other.host == address.host
    ]
    objects = open_object_store(
        address,
        endpoint=next((endpoint for endpoint in endpoints if endpoint), None),
        ca_bundle=site.ca_bundle,
        wording=WORDING,
    )
    return SqshStore(address=str(address), objects=objects)


def store_of(place: str, site: Site) -> SqshStore:
    """The store that a publication's ``sqsh.place`` lies in.

    Raises:
        ConfigurationError: it is not the address of a .sqsh in a store.
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ConfigurationError(
            f"{place!r:.200} is not the address of a .sqsh",
            why=f"A publication states it. Such an address ends in /{FILES}/HEX{SUFFIX}.",
            fix="Publish the image again.",
        )
    return open_sqsh_store(match[1], site)


def document_of(publication: Publication) -> str:
    """The path of a publication's document."""
    return f"{PUBLICATIONS}/{publication.tag}/{hex_of(publication.oci_digest)}.json"


def _newer(there: bytes, publication: Publication, at: datetime) -> bytes:
    """The document of an image that stays: a revoked publication, else the newer one that counts at a moment."""
    try:
        known = read_publication(there, "")
    except CheckRefusedError:
        return publication.canonical()
    newer = moment_of(known.published_at) > moment_of(publication.published_at)
    moments = [moment for moment in (known.published_at, known.certified_at) if moment]
    whole = known.is_of_same_image(publication) and not any(is_after(moment, at) for moment in moments)
    return there if known.revoked is not None or (newer and whole) else publication.canonical()
