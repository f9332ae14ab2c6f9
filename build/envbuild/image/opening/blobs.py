"""Where the files of an image lie: in a folder, or in an archive that is not unpacked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from envbuild.image.opening.model import Member, not_an_image

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Manifests and configurations; what is longer is none.
DOCUMENT_BYTES = 16 << 20
PIECE_BYTES = 1 << 20


class Place(Protocol):
    """Opens files by their path below the image's root."""

    source: str

    def open(self, path: str) -> BinaryIO:
        """A file, open for reading and seeking. Raises :class:`FileNotFoundError`."""

    def size(self, path: str) -> int:
        """Its size in bytes."""


class Folder:
    """An image's files in a directory."""

    def __init__(self, root: Path) -> None:
        self.source = str(root)
        self._root = root

    def open(self, path: str) -> BinaryIO:
        return (self._root / path).open("rb")

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size


class Archive:
    """An image's files in a tar, which is read where it lies."""

    def __init__(self, file: Path) -> None:
        self.source = str(file)
        try:
            self._tar = tarfile.open(file, "r:*")  # noqa: SIM115 - as long as the image is read
            self._members = {member.name.removeprefix("./"): member for member in self._tar if member.isreg()}
        except (tarfile.TarError, EOFError) as error:
            raise not_an_image(file, str(error)) from error

    def open(self, path: str) -> BinaryIO:
        if path not in self._members:
            raise FileNotFoundError(path)
        return cast("BinaryIO", self._tar.extractfile(self._members[path]))

    def size(self, path: str) -> int:
        if path not in self._members:
            raise FileNotFoundError(path)
        return self._members[path].size


def document(place: Place, path: str) -> Any:
    """A JSON file."""
    try:
        with place.open(path) as stream:
            content = stream.read(DOCUMENT_BYTES + 1)
        if len(content) > DOCUMENT_BYTES:
            raise not_an_image(place.source, f"{path} has more than {DOCUMENT_BYTES >> 20} MiB.")
        return json.loads(content)
    except FileNotFoundError as error:
        raise not_an_image(place.source, f"{path} is missing.") from error
    except ValueError as error:
        raise not_an_image(place.source, f"{path}: {error}") from error


def blob_path(place: Place, digest: object) -> str:
    """Where a blob lies; digests become file names, so their form is looked at."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise not_an_image(place.source, f"It names a blob {digest!r}; only sha256 digests are known.")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def file_digest(place: Place, path: str) -> str:
    """The digest of a file."""
    found = hashlib.sha256()
    try:
        with place.open(path) as stream:
            while piece := stream.read(PIECE_BYTES):
                found.update(piece)
    except FileNotFoundError as error:
        raise not_an_image(place.source, f"{path} is missing.") from error
    return f"sha256:{found.hexdigest()}"


@contextlib.contextmanager
def members(place: Place, path: str) -> Iterator[Iterator[Member]]:
    """The members of a layer."""
    with place.open(path) as stream:
        yield read_stream(stream, f"{place.source}: {path}")


def read_stream(stream: BinaryIO, name: str) -> Iterator[Member]:
    """The members of a tar, compressed or not, with content for files, to be read at once."""
    try:
        with tarfile.open(fileobj=stream, mode="r:*", encoding="utf-8", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                yield member, cast("BinaryIO", tar.extractfile(member)) if member.isreg() else None
                tar.members = []  # type: ignore[attr-defined]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise not_an_image(name, f"A layer cannot be read: {error}") from error
