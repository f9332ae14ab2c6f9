"""Where the files of an image lie: in a folder, or in an archive, out of which they are taken when asked for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from envbuild.core import jsonread
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.oci.opened import not_an_image
from envbuild.rootfs.tars import damage_refused, open_archive

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Manifests and configurations; what is longer is none.
DOCUMENT_BYTES = 16 << 20


class ImageFiles(Protocol):
    """The files of an image by their path below its root."""

    source: str

    def file(self, path: str, at_most_bytes: int | None = None) -> Path:
        """A file of this machine. Raises :class:`FileNotFoundError`; CheckRefusedError where it is larger."""


class FolderFiles:
    """An image's files in a directory."""

    def __init__(self, root: Path) -> None:
        self.source = str(root)
        self._root = root

    def file(self, path: str, at_most_bytes: int | None = None) -> Path:
        found = self._root / path
        if not found.is_file():
            raise FileNotFoundError(path)
        _refuse_larger(self.source, path, found.stat().st_size, at_most_bytes)
        return found


class ArchiveFiles:
    """An image's files in a tar.

    Args:
        scratch: where they are put, under names of our own.
    """

    def __init__(self, file: Path, scratch: Path) -> None:
        self.source = str(file)
        self._scratch = scratch
        self._taken: dict[str, Path] = {}
        with damage_refused(self._refused):
            self._tar, self._members = open_archive(file)

    def _refused(self, why: str) -> CheckRefusedError:
        return not_an_image(self.source, why)

    def file(self, path: str, at_most_bytes: int | None = None) -> Path:
        if path not in self._members or not self._members[path].isreg():
            raise FileNotFoundError(path)
        _refuse_larger(self.source, path, self._members[path].size, at_most_bytes)
        if path not in self._taken:
            target = self._scratch / f"file-{len(self._taken)}"
            refusing = damage_refused(lambda why: self._refused(f"{path}: {why}"))
            with machine_errors(target), refusing, target.open("wb") as stream:
                shutil.copyfileobj(cast("BinaryIO", self._tar.extractfile(self._members[path])), stream)
            self._taken[path] = target
        return self._taken[path]


def _refuse_larger(source: str, path: str, size: int, at_most_bytes: int | None) -> None:
    if at_most_bytes is not None and size > at_most_bytes:
        raise not_an_image(source, f"{path} has more than {at_most_bytes >> 20} MiB.")


def has(place: ImageFiles, path: str) -> bool:
    """Whether the document is there."""
    try:
        place.file(path, DOCUMENT_BYTES)
    except FileNotFoundError:
        return False
    return True


def file_of(place: ImageFiles, path: str, at_most_bytes: int | None = None) -> Path:
    """A file that must be there."""
    try:
        return place.file(path, at_most_bytes)
    except FileNotFoundError as error:
        raise not_an_image(place.source, f"{path} is missing.") from error


def document(place: ImageFiles, path: str) -> Any:
    """A JSON file."""
    file = file_of(place, path, DOCUMENT_BYTES)
    try:
        return jsonread.loads(file.read_bytes())
    except ValueError as error:
        raise not_an_image(place.source, f"{path}: {error}") from error


def blob_path(place: ImageFiles, digest: object) -> str:
    """Where a blob lies; digests become file names, so their form is looked at."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise not_an_image(place.source, f"It names a blob {digest!r}; only sha256 digests are known.")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
