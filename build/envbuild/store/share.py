"""A directory that machines share: a file appears there whole, by a link or a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import MachineError, NetworkError
from envbuild.core.files import NotPlainFileError, machine_errors, open_plain, read_at_most, read_plain
from envbuild.core.locks import close_to_readers, is_file_at
from envbuild.core.process import ProcessOptions, run
from envbuild.store.backend import StoredObject
from envbuild.store.registry_errors import Wording

CHUNK_BYTES = 1 << 20
# Where files are written before they have their names: links and renames need one file system.
INCOMING = "incoming"
# File systems without hard links say one of these.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# Lustre mounted without flock says one of these (mount.lustre(8)).
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
# 32 stripes of 4 MiB, as CSCS's uenv lays out its .sqsh files; Lustre takes fewer where it has fewer targets.
STRIPES, STRIPE_SIZE, LEAST_STRIPED_BYTES = 32, "4M", 64 << 20
LFS_SECONDS = 60


class Share:
    """The files below a directory; an object store (:class:`~envbuild.store.backend.ObjectStore`)."""

    def __init__(self, root: Path, wording: Wording) -> None:
        self._root = root
        self._wording = wording

    @property
    def address(self) -> str:
        return f"file://{self._root}"

    def read(self, path: str, at_most_bytes: int) -> StoredObject | None:
        with self._errors("read"):
            try:
                # Of one open file: the name may lead to another one a moment later.
                with open_plain(self._root / path) as stream:
                    content, info = (
                        read_at_most(stream, path.rpartition("/")[2], at_most_bytes),
                        os.fstat(stream.fileno()),
                    )
            except FileNotFoundError:
                return None
        return StoredObject(content, {"digest": sha256_bytes(content)}, _modified(info))

    def create(self, path: str, content: bytes) -> bool:
        with self._errors("write"), self._written(content) as temporary:
            final = self._made(path)
            try:
                # link(2) fails where the name is taken, and what appears is whole. open(2) names it as the way that
                # also works on NFS.
                os.link(temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _created(final, content)
        return True

    def replace(self, path: str, content: bytes, of: StoredObject) -> bool:
        with self._errors("write"), self._written(content) as temporary, self._alone():
            try:
                if read_plain(self._root / path, len(of.content)) != of.content:
                    return False
            except (FileNotFoundError, NotPlainFileError):  # removed, or larger
                return False
            temporary.replace(self._root / path)
        return True

    def write(self, path: str, content: bytes) -> None:
        """Put an object there, in the place of what is there."""
        with self._errors("write"), self._written(content) as temporary:
            temporary.replace(self._made(path))

    def remove(self, path: str) -> None:
        with self._errors("write"), self._alone():
            (self._root / path).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        with self._errors("read"):
            paths = sorted(self._root.joinpath(prefix).rglob("*"))
            return [path.relative_to(self._root).as_posix() for path in paths if not path.is_dir()]

    def size(self, path: str) -> int | None:
        with self._errors("read"):
            try:
                info = (self._root / path).stat()
            except FileNotFoundError:
                return None
            return info.st_size if stat.S_ISREG(info.st_mode) else None

    def upload(self, file: Path, path: str, size_bytes: int) -> None:
        """Put a file there. What a killed process had copied of it is compared, and not copied again."""
        with self._errors("write"):
            area = self._incoming()
            # Not a name of its own: the next process goes on with it.
            part = area / f"{path.rpartition('/')[2]}.part"
            if size_bytes >= LEAST_STRIPED_BYTES and not part.exists():
                _stripe(part)
            with self._held(part):
                # Not "wb", which would empty it; the lock has made the file where it was missing.
                with file.open("rb") as source, part.open("r+b") as there:
                    _continue(source, there)
                # Only now may others open it.
                with contextlib.suppress(PermissionError):  # what another account began
                    part.chmod(0o664 & ~_umask())
                # Still held: whoever waited for the name finds that it leads to no file any more.
                part.replace(self._made(path))

    def has_conditions(self) -> bool:
        return True

    def now(self) -> datetime:
        # Of a file server where there is one, which also gives the objects their times.
        with self._errors("write"), self._written(b"") as temporary:
            return _modified(temporary.stat())

    def download(self, path: str, size_bytes: int, to: Path, start: int = 0) -> bool:
        with self._errors("read"):
            try:
                source = open_plain(self._root / path)
            except FileNotFoundError:
                return False
        with source, machine_errors(to), to.open("ab" if start else "wb") as out:
            source.seek(start)
            left = size_bytes - start + 1  # one more, so that a file that is too long is noticed
            while left > 0 and (chunk := source.read(min(left, CHUNK_BYTES))):
                out.write(chunk)
                left -= len(chunk)
        return True

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """The directory itself must be there: a share that is not mounted is not an empty store."""
        refusal: NotPlainFileError | None = None
        with machine_errors(self._root, doing):
            if not self._root.is_dir():
                raise NetworkError(
                    f"the {self._wording.noun} {self.address} cannot be reached",
                    why="There is no such directory.",
                    fix=f"Mount the file system it is on, or make the directory.{self._wording.otherwise}",
                )
            try:
                yield
            except NotPlainFileError as error:  # what somebody put there, and not the machine's fault
                refusal = error
        if refusal is not None:
            raise refusal

    def _incoming(self) -> Path:
        area = self._root / INCOMING
        area.mkdir(exist_ok=True)
        return area

    def _made(self, path: str) -> Path:
        """The place of an object, whose folder is there."""
        final = self._root / path
        final.parent.mkdir(parents=True, exist_ok=True)
        return final

    @contextlib.contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        """A file of a name that no other process has, here or on another machine."""
        temporary = self._incoming() / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._held(self._incoming() / "lock"):
            yield

    @contextlib.contextmanager
    def _held(self, path: Path) -> Iterator[None]:
        """Hold a file that is made where it is missing: one process at a time, on all machines."""
        # Not core.locks: its files are one account's, and a share may have several.
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
            try:
                close_to_readers(descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    raise MachineError(
                        f"files in {self._root} cannot be locked",
                        why=f"{error.strerror}: two publishers could overwrite each other's entry.",
                        fix="Have the file system mounted with locks (Lustre: -o flock), or use a bucket.",
                    ) from error
                if is_file_at(descriptor, path):
                    yield
                    return
            finally:
                os.close(descriptor)


def _umask() -> int:
    # umask(2) cannot be asked without setting it, for all threads.
    status = Path("/proc/self/status").read_text()
    return next((int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:")), 0o022)


def _modified(info: os.stat_result) -> datetime:
    return datetime.fromtimestamp(info.st_mtime, timezone.utc)


def _continue(source: BinaryIO, there: BinaryIO) -> None:
    """Make one file equal to another, from the first difference on."""
    differs = False
    while chunk := source.read(CHUNK_BYTES):
        if not differs:
            start = there.tell()
            differs = there.read(len(chunk)) != chunk
            if differs:
                there.seek(start)
        if differs:
            there.write(chunk)
    there.truncate()
    there.flush()
    os.fsync(there.fileno())


def _stripe(part: Path) -> None:
    """Make an empty file that is spread over Lustre's storage targets, where that is a place on Lustre."""
    # A file gets its layout when it is made, and a rename keeps it (lfs-setstripe(1)).
    program = shutil.which("lfs")
    if program is None:
        return
    # It fails on any other file system, which needs no stripes.
    run(
        [program, "setstripe", "-c", str(STRIPES), "-S", STRIPE_SIZE, str(part)],
        what="stripe a file",
        check=False,
        options=ProcessOptions(timeout_seconds=LFS_SECONDS, error=MachineError),
    )


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
