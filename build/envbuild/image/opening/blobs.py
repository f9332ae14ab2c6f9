"""Where the files of an image lie: in a folder, or in an archive, out of which they are taken when asked for."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from envbuild.core import jsonread
from envbuild.core.files import machine_errors
from envbuild.image.opening.model import not_an_image

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Manifests and configurations; what is longer is none.
DOCUMENT_BYTES = 16 << 20


class Place(Protocol):
    """The files of an image by their path below its root."""

    source: str

    def file(self, path: str) -> Path:
        """A file of this machine. Raises :class:`FileNotFoundError`."""


class Folder:
    """An image's files in a directory."""

    def __init__(self, root: Path) -> None:
        self.source = str(root)
        self._root = root

    def file(self, path: str) -> Path:
        found = self._root / path
        if not found.is_file():
            raise FileNotFoundError(path)
        return found


class Archive:
    """An image's files in a tar.

    Args:
        scratch: where they are put, under names of our own.
    """

    def __init__(self, file: Path, scratch: Path) -> None:
        self.source = str(file)
        self._scratch = scratch
        self._taken: dict[str, Path] = {}
        try:
            self._tar = tarfile.open(file, "r:*")  # noqa: SIM115 - as long as the image is read
            self._members = {member.name.removeprefix("./"): member for member in self._tar if member.isreg()}
        except (tarfile.TarError, EOFError) as error:
            raise not_an_image(file, str(error)) from error

    def file(self, path: str) -> Path:
        if path not in self._members:
            raise FileNotFoundError(path)
        if path not in self._taken:
            target = self._scratch / f"file-{len(self._taken)}"
            with machine_errors(target), target.open("wb") as stream:
                try:
                    shutil.copyfileobj(cast("BinaryIO", self._tar.extractfile(self._members[path])), stream)
                except (tarfile.TarError, EOFError) as error:
                    raise not_an_image(self.source, f"{path}: {error}") from error
            self._taken[path] = target
        return self._taken[path]


def has(place: Place, path: str) -> bool:
    """Whether the file is there."""
    try:
        place.file(path)
    except FileNotFoundError:
        return False
    return True


def file_of(place: Place, path: str) -> Path:
    """A file that must be there."""
    try:
        return place.file(path)
    except FileNotFoundError as error:
        raise not_an_image(place.source, f"{path} is missing.") from error


def document(place: Place, path: str) -> Any:
    """A JSON file."""
    file = file_of(place, path)
    if file.stat().st_size > DOCUMENT_BYTES:
        raise not_an_image(place.source, f"{path} has more than {DOCUMENT_BYTES >> 20} MiB.")
    try:
        return jsonread.loads(file.read_bytes())
    except ValueError as error:
        raise not_an_image(place.source, f"{path}: {error}") from error


def blob_path(place: Place, digest: object) -> str:
    """Where a blob lies; digests become file names, so their form is looked at."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise not_an_image(place.source, f"It names a blob {digest!r}; only sha256 digests are known.")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
