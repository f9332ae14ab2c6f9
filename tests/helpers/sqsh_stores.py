"""Images that are put into .sqsh stores: publications with their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helpers.publications import make_publication

from envbuild.core.digests import sha256_bytes
from envbuild.publish.models import Publication, PublishedSqsh
from envbuild.publish.sqsh_stores import SqshStore

BUNDLE = b'{"mediaType":"a bundle"}'


@dataclass(frozen=True)
class Image:
    """A .sqsh and its publication."""

    file: Path
    publication: Publication

    def put(self, store: SqshStore) -> str:
        return store.put(self.file, self.publication, BUNDLE)


def make_image(store: SqshStore, folder: Path, name: str = "a", **changes: object) -> Image:
    """An image of its own content, lock and tag for a store; ``changes`` are fields of its publication."""
    file = folder / f"{name}.sqsh"
    content = f"hsqs {name} ".encode() * 1000
    file.write_bytes(content)
    digest = sha256_bytes(content)
    sqsh = PublishedSqsh(digest=digest, size_bytes=len(content), place=store.place_of(digest))
    fields: dict[str, object] = {
        "oci_digest": sha256_bytes(f"oci {name}".encode()),
        "sqsh": sqsh,
        "certificate_digest": sha256_bytes(BUNDLE),
        "tag": f"mcore-{name}-cpu",
        "moving_tag": "mcore-cpu",
    }
    return Image(file, make_publication(**(fields | changes)))
