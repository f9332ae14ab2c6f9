"""The files of an image: in a folder, or in an archive, out of which they are read when they are wanted."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
from pathlib import Path
from typing import Protocol, cast

from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.oci.models import DOCUMENT_BYTES, Descriptor, M, Refuse, not_an_image, read
from envbuild.rootfs.tars import damage_refused, open_archive

COPY_BYTES = 1 << 20


class ImageSource(Protocol):
    """Whatever has an image. Callers compare what it gives with the digest that they want."""

    @property
    def name(self) -> str:
        """What errors call the image."""

    def document(self, digest: str, *, manifest: bool) -> bytes:
        """A manifest, an index or a configuration."""

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        """Write a layer to a file."""


class ImageFiles:
    """The files of an image by their path below its root.

    Attributes:
        name: what errors call it.
    """

    def __init__(self, name: str, refuse: Refuse) -> None:
        self.name = name
        self._refuse = refuse

    def refused(self, why: str, fix: str = "") -> CheckRefusedError:
        """The error for what it holds."""
        return self._refuse(self.name, why, fix)

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        raise NotImplementedError

    def file(self, path: str) -> Path:
        """A file of this machine with the content."""
        raise NotImplementedError

    def copy(self, path: str, to: Path) -> None:
        """Write the content to another file."""
        raise NotImplementedError

    def read(self, path: str) -> bytes:
        """The content of a document."""
        raise NotImplementedError

    def document(self, digest: str, *, manifest: bool) -> bytes:  # noqa: ARG002 - all are blobs here
        return self.read(blob_path(digest))

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        self.copy(blob_path(descriptor.digest), to)

    def parse(self, path: str, model: type[M]) -> M:
        """A document as its model."""
        return read(self.read(path), model, self.name, self._refuse)

    def blob(self, descriptor: Descriptor, model: type[M]) -> M:
        """A document that has the digest by which it is named."""
        raw = self.read(path := blob_path(descriptor.digest))
        self._compare(path, sha256_bytes(raw), descriptor)
        return read(raw, model, self.name, self._refuse)

    def check(self, descriptor: Descriptor) -> None:
        """Refuse a blob that has not the digest by which it is named."""
        path = blob_path(descriptor.digest)
        self._compare(path, sha256_file(self.file(path)), descriptor)

    def _compare(self, path: str, actual: str, descriptor: Descriptor) -> None:
        if actual != descriptor.digest:
            raise self.refused(f"{path} has the digest {actual}.")

    def _missing(self, path: str) -> CheckRefusedError:
        return self.refused(f"{path} is missing, or is not a file.")

    def _refuse_larger(self, path: str, size: int) -> None:
        if size > DOCUMENT_BYTES:
            raise self.refused(f"{path} has more than {DOCUMENT_BYTES >> 20} MiB.")


class FolderFiles(ImageFiles):
    """An image's files in a directory."""

    def __init__(self, root: Path, name: str = "", refuse: Refuse = not_an_image) -> None:
        super().__init__(name or str(root), refuse)
        self._root = root

    def has(self, path: str) -> bool:
        return (self._root / path).is_file()

    def file(self, path: str) -> Path:
        if not self.has(path):
            raise self._missing(path)
        return self._root / path

    def copy(self, path: str, to: Path) -> None:
        file = self.file(path)
        with machine_errors(to):
            # No hard link: later changes there must not reach the store.
            shutil.copyfile(file, to)

    def read(self, path: str) -> bytes:
        file = self.file(path)
        with machine_errors(file, "read"):
            self._refuse_larger(path, file.stat().st_size)
            return file.read_bytes()


class ArchiveFiles(ImageFiles):
    """An image's files in a tar: an OCI layout, or what ``docker save`` writes.

    Args:
        scratch: where files are put, under names of our own.
    """

    def __init__(self, file: Path, scratch: Path, name: str = "", refuse: Refuse = not_an_image) -> None:
        super().__init__(name or str(file), refuse)
        self._scratch = scratch
        # What is wanted as a file is written out once: a compressed tar cannot be read at random.
        self._copies: dict[str, Path] = {}
        with self._refusing():
            self._tar, self._members = open_archive(file)

    def close(self) -> None:
        """Let go of the file."""
        self._tar.close()

    def has(self, path: str) -> bool:
        return self._find(path) is not None

    def file(self, path: str) -> Path:
        if path not in self._copies:
            copy = self._scratch / f"file-{len(self._copies)}"
            self.copy(path, copy)
            self._copies[path] = copy
        return self._copies[path]

    def copy(self, path: str, to: Path) -> None:
        member = self._member(path)
        # To a name of our own: names in the archive, with ".." or absolute, are not used on this machine.
        with machine_errors(to), self._refusing(f"{path}: "), to.open("wb") as out:
            shutil.copyfileobj(cast("tarfile.ExFileObject", self._tar.extractfile(member)), out, COPY_BYTES)

    def read(self, path: str) -> bytes:
        member = self._member(path)
        self._refuse_larger(path, member.size)
        with self._refusing(f"{path}: "):
            return cast("tarfile.ExFileObject", self._tar.extractfile(member)).read()

    def _find(self, path: str) -> tarfile.TarInfo | None:
        member = self._members.get(path)
        for _ in range(2):  # docker before 25 writes a layer that it has already as a link to it
            if member is not None and (member.issym() or member.islnk()):
                above = path.rpartition("/")[0].split("/") if member.issym() else []
                path = _joined(above, member.linkname)
                member = self._members.get(path)
        return member if member is not None and member.isreg() else None

    def _member(self, path: str) -> tarfile.TarInfo:
        member = self._find(path)
        if member is None:
            raise self._missing(path)
        return member

    def _refusing(self, prefix: str = "") -> contextlib.AbstractContextManager[None]:
        return damage_refused(lambda why: self.refused(f"{prefix}{why}"))


def _joined(above: list[str], link: str) -> str:
    parts = list(above)
    # Within the archive alone: a link never reaches a file of this machine.
    for part in link.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def blob_path(digest: str) -> str:
    """Where a blob lies in a layout."""
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
