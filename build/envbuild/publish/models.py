"""A publication: one image for one target, as it was published.

Its JSON is in the annotations of a repository's index, and next to a .sqsh in a store; readers refuse keys that they do
not know, so a new key needs a new schema.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from envbuild.catalog.fields import Moment, Name, TomlModel
from envbuild.core import jsonread
from envbuild.core.digests import canonical_json
from envbuild.core.errors import CheckRefusedError
from envbuild.core.validation import Digest, describe_errors

# 1 has no signature.
Schema = Literal["envbuild.publication/1", "envbuild.publication/2"]
SCHEMA: Schema = "envbuild.publication/2"
# OCI distribution-spec 1.1, "Pulling manifests": what a tag may be.
TAG_PATTERN = r"^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$"


class PublishedSqsh(TomlModel):
    """The .sqsh of an image, and where it is."""

    digest: Digest
    size_bytes: int = Field(ge=0, strict=True)
    place: str = Field(default="", description="its address in a .sqsh store; empty: in the registry, as a referrer")


def _base64(text: str) -> str:
    # Another text of the same bytes would be another publication.
    if base64.b64encode(base64.b64decode(text, validate=True)).decode() != text:
        raise ValueError("it is not base64 as it is written")
    return text


class PublicationSignature(TomlModel):
    """The signature of a publication, and the ID of its key."""

    keyid: str
    sig: Annotated[str, AfterValidator(_base64)] = Field(description="of DSSE, in base64")


class Revocation(TomlModel):
    """Why and when a publication was taken back."""

    reason: str = Field(min_length=1)
    at: Moment


class Publication(TomlModel):
    """One image for one target, as it was published."""

    model_config = ConfigDict(populate_by_name=True)

    # `schema` is a method of pydantic's models.
    schema_: Schema = Field(alias="schema", default=SCHEMA)
    stack: Name
    base: Name
    target: Name
    lock_name: Name = Field(description="of the lock: the stack's name, or its own")
    lock_digest: Digest
    oci_digest: Digest = Field(description="of the OCI manifest")
    docker_digest: Digest | None = Field(default=None, description="of docker's manifest of the same blobs")
    size_bytes: int = Field(ge=0, strict=True, description="of all layers, as they are sent")
    sqsh: PublishedSqsh | None = None
    certificate_digest: Digest | None = Field(default=None, description="of the certificate's file; None: uncertified")
    keyid: str | None = Field(default=None, description="of the key that signed the certificate")
    certified_at: Moment | None = Field(default=None, description="when the certificate was issued")
    measured_at: Moment | None = Field(default=None, description="the oldest moment at which it measured something")
    published_at: Moment
    tag: str = Field(pattern=TAG_PATTERN, description="the immutable one: of this lock and target alone")
    moving_tag: str = Field(pattern=TAG_PATTERN, description="the one that goes on to the next certified image")
    base_digest: Digest = Field(description="of the base as it is in the image")
    base_rebuilt: bool = Field(description="made from its definition, since the locked base could not be had")
    gpus: tuple[str, ...] = Field(default=(), description="the target's SMs, such as '90'; none for a CPU target")
    envbuild: str = Field(description="the version that published it")
    revoked: Revocation | None = None
    signature: PublicationSignature | None = Field(default=None, description="of all but itself and the revocation")

    @model_validator(mode="after")
    def _certified_as_a_whole(self) -> Publication:
        parts = (self.certificate_digest, self.keyid, self.certified_at, self.measured_at)
        if len({part is None for part in parts}) > 1:
            raise ValueError("certificate_digest, keyid, certified_at and measured_at are all there, or none is")
        return self

    @property
    def certified(self) -> bool:
        """Whether it was published with a certificate that counted, and was not revoked since."""
        return self.certificate_digest is not None and self.revoked is None

    @property
    def digests(self) -> tuple[str | None, ...]:
        """The digests that name it: of the OCI image, of docker's manifest, of the .sqsh."""
        return self.oci_digest, self.docker_digest, self.sqsh.digest if self.sqsh else None

    def is_of_same_image(self, other: Publication) -> bool:
        """Whether all agrees that follows from the image."""
        names = ("stack", "base", "target", "lock_digest", "oci_digest", "base_digest", "base_rebuilt", "size_bytes")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def canonical(self) -> bytes:
        """Its JSON in the one form that is kept."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))

    def signed_content(self) -> bytes:
        """The bytes that its signature covers; without the revocation, which needs no key."""
        return canonical_json(self.model_dump(mode="json", by_alias=True, exclude={"revoked", "signature"}))


def unreadable_revocation(publication: Publication) -> Revocation:
    """The revocation of a publication where something has its place and cannot be read."""
    return Revocation(reason="What is in the place of its revocation cannot be read.", at=publication.published_at)


PUBLISH_AGAIN = "Use the version of envbuild that wrote it, or publish the image again."


def read_publication(data: bytes, where: str, fix: str = PUBLISH_AGAIN) -> Publication:
    """The publication in a JSON document.

    Args:
        where: what holds it, for the error.
        fix: what helps.

    Raises:
        CheckRefusedError: it is not one, or was written by another version of envbuild.
    """
    try:
        # For what pydantic 2 accepts: of a key that comes twice it takes the last value.
        jsonread.loads(data)
        return Publication.model_validate_json(data, strict=True)
    except ValidationError as error:
        why = f"Its publication cannot be read: {describe_errors(error)}."
        raise CheckRefusedError(f"{where} is refused", why=why, fix=fix) from error
    except ValueError as error:
        raise CheckRefusedError(f"{where} is refused", why=f"Its publication is not JSON: {error}", fix=fix) from error
