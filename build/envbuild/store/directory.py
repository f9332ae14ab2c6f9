"""A remote store in a directory of a shared file system: a file appears there whole, by a link or a rename."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.core.files import NotPlainFileError, machine_errors, open_plain, read_plain
from envbuild.store.backend import BLOBS, ENTRIES, INDEX, EntryFiles, EntryRef
from envbuild.store.document import MOST_BYTES, refused

CHUNK_BYTES = 1 << 20
# File systems without hard links say one of these.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Directory:
    """Entries under ``entries/``, their files under ``blobs/sha256/``, the index as empty files under ``shelves/``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, kind: str, key: str) -> bytes | None:
        with self._errors("read"):
            try:
                return read_plain(self._entry(kind, key), MOST_BYTES)
            except FileNotFoundError:
                return None
            except NotPlainFileError as error:
                raise refused(kind, key, self._address, f"Its document is not a file: {error}.") from error

    def create(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> bool:  # noqa: ARG002
        # The index first: what it lists may be missing, but no entry is missing from it.
        self._write_index(kind, key, index_path)
        with self._errors("write"), self._written(document) as temporary:
            final = self._entry(kind, key)
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                # link(2) fails where the name is taken, and what appears is whole. open(2) names it as the way that
                # also works on NFS.
                os.link(temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _created(final, document)
        return True

    def replace(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> None:  # noqa: ARG002
        self._write_index(kind, key, index_path)
        with self._errors("write"), self._written(document) as temporary:
            temporary.replace(self._entry(kind, key))

    def keys(self, kind: str) -> list[str]:
        with self._errors("read"):
            return [f"sha256:{path.stem}" for path in self._listed(self._root / ENTRIES / kind) if path.suffix]

    def list_index(self, kind: str, index_path: tuple[str, ...]) -> list[EntryRef]:
        top = self._root / INDEX / kind
        with self._errors("read"):
            files = [path.relative_to(top) for path in top.joinpath(*index_path).rglob("*") if path.is_file()]
        return [EntryRef(f"sha256:{path.name}", path.parts[:-1]) for path in files]

    def has(self, digest: str, size_bytes: int) -> bool:
        with self._errors("read"):
            try:
                info = self._blob(digest).stat()
            except FileNotFoundError:
                return False
            return stat.S_ISREG(info.st_mode) and info.st_size == size_bytes

    def upload(self, file: Path, digest: str, size_bytes: int) -> None:  # noqa: ARG002
        with self._errors("write"), self._temporary() as temporary:
            shutil.copyfile(file, temporary)
            _sync(temporary)
            final = self._blob(digest)
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(final)

    def download(self, digest: str, size_bytes: int, to: Path) -> bool:
        with self._errors("read"):
            try:
                source = open_plain(self._blob(digest))
            except FileNotFoundError:
                return False
            except NotPlainFileError as error:
                raise CheckRefusedError(
                    f"a file of the store {self._address} is refused",
                    why=f"{error}, under {BLOBS}/.",
                    fix="Remove it there; with a good wheel here `envbuild wheels push` puts the file back.",
                ) from error
        with source, machine_errors(to), to.open("wb") as out:
            left = size_bytes + 1  # one more, so that a file that is too long is noticed
            while left > 0 and (chunk := source.read(min(left, CHUNK_BYTES))):
                out.write(chunk)
                left -= len(chunk)
        return True

    @property
    def _address(self) -> str:
        return f"file://{self._root}"

    def _write_index(self, kind: str, key: str, index_path: tuple[str, ...]) -> None:
        with self._errors("write"):
            mark = self._root.joinpath(INDEX, kind, *index_path, _hex(key))
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def _entry(self, kind: str, key: str) -> Path:
        return self._root / ENTRIES / kind / f"{_hex(key)}.json"

    def _blob(self, digest: str) -> Path:
        return self._root / BLOBS / _hex(digest)

    def _listed(self, folder: Path) -> list[Path]:
        return sorted(folder.iterdir()) if folder.is_dir() else []

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A file name on the store's disk that no other process has, here or on another machine."""
        # In the store itself: links and renames need one file system.
        area = self._root / "incoming"
        area.mkdir(exist_ok=True)
        temporary = area / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        with self._temporary() as temporary:
            temporary.write_bytes(content)
            _sync(temporary)
            yield temporary

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """The directory itself must be there: a share that is not mounted is not an empty store."""
        with machine_errors(self._root, doing):
            if not self._root.is_dir():
                raise NetworkError(
                    f"the store {self._address} cannot be reached",
                    why="There is no such directory.",
                    fix="Mount the file system it is on, or make the directory; ENVBUILD_STORE=off goes on without it.",
                )
            yield


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _created(path: Path, content: bytes) -> bool:
    """Write a file that is not there yet, where links are not possible."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return True
