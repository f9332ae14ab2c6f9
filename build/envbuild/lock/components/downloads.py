"""The files that a uv.lock names: which a base can install, downloaded, verified and kept in the store, and read.

Downloads carry the credentials that uv would send.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.catalog.base import Base
from envbuild.catalog.fields import MACHINES
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError, ResolutionError
from envbuild.lock.context import LockContext
from envbuild.lock.uv.fetch import FetchLimits, fetch
from envbuild.lock.uv.remote_file import open_remote
from envbuild.lock.uv_lock import LockedFile, ResolvedPackage


def base_tags(base: Base) -> frozenset[Tag]:
    """The wheel tags that a base can install (PEP 425, PEP 600)."""
    return _tags(base.python.version, int(base.glibc.split(".")[1]), MACHINES[base.platform])


@cache
def _tags(python: str, glibc: int, machine: str) -> frozenset[Tag]:
    major, minor = (int(part) for part in python.split("."))
    # PEP 600: a wheel for a glibc runs on every later one. manylinux1, the oldest, is 2.5.
    platforms = [f"manylinux_2_{number}_{machine}" for number in range(glibc, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    interpreter = f"cp{major}{minor}"
    return frozenset(
        [
            *cpython_tags((major, minor), platforms=platforms),
            *compatible_tags((major, minor), interpreter, platforms),
        ]
    )


def tags_of(wheel: str) -> frozenset[Tag]:
    """The tags in the file name of a wheel; empty for other names."""
    try:
        return parse_wheel_filename(wheel)[3]
    except InvalidWheelFilename:
        return frozenset()


# What the readers raise for bytes that are not an archive: gzip's BadGzipFile is an OSError, and a stream that is cut
# off ends with EOFError. zipfile raises RuntimeError for what is encrypted or compressed in another way.
NOT_AN_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError)


def archive_members(content: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files of a .zip or .tar.gz, each with what reads it for as long as it is the last one."""
    # Old sdists may be zip files; PEP 625 allows .tar.gz only.
    if content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((member, partial(archive.read, member)) for member in archive.namelist())
        return
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as tar:
        yield from ((entry.name, partial(_extracted, tar, entry)) for entry in tar if entry.isfile())
        # tarfile takes a damaged header for the end; the checksum of what compressed it comes after the real one.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass


def _extracted(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(entry)
    return stream.read() if stream else b""


# Whole files: torch's wheels have more than 2 GB.
_LIMITS = FetchLimits(most_bytes=8 << 30, seconds=3600, idle_seconds=300)
_METADATA_LIMITS = FetchLimits(most_bytes=64 << 20, seconds=120, idle_seconds=30)
FILE = "file"


def fetch_sdist(package: ResolvedPackage, context: LockContext) -> tuple[bytes, str]:
    """The sdist of a package, verified, and its digest; kept in the store.

    Raises:
        ResolutionError: the package has no sdist.
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    if package.sdist is None:
        raise ResolutionError(
            f"{package.title} has no sdist",
            why="A component of the compile phase is built from its sources.",
            fix='Give it phase = "main" in the stack\'s file if its wheels are meant, or choose another version.',
        )
    return fetch_file(package.sdist, f"the sdist of {package.title}", context)


def fetch_file(file: LockedFile, title: str, context: LockContext) -> tuple[bytes, str]:
    """A file that a uv.lock names, verified, and its digest; kept in the store.

    Paths in uv.lock count from the folder of the context.

    Raises:
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    digest = file.sha256

    def download(entry: Path) -> None:
        (entry / FILE).write_bytes(_verified(file, _read(file, title, context), title))

    # Without a stated hash there is nothing to keep it under.
    if not digest:
        content = _read(file, title, context)
        return content, sha256_bytes(content)
    return (context.store.get_or_build("files", digest, download).path / FILE).read_bytes(), digest


def _verified(file: LockedFile, content: bytes, title: str) -> bytes:
    digest = file.sha256
    if digest and sha256_bytes(content) != digest:
        raise CheckRefusedError(
            f"{title} is not the file that the index states",
            why=f"Stated {digest}, downloaded {sha256_bytes(content)}.",
            fix="Try again; if it stays, the index or a proxy serves another file.",
        )
    return content


def wheel_metadata(file: LockedFile, title: str, context: LockContext) -> bytes:
    """The METADATA of a wheel that a uv.lock names: next to it (PEP 658), else read in it; kept in the store.

    Raises:
        NetworkError: it cannot be had.
        CheckRefusedError: what came has another hash, or is not a wheel.
    """

    def extract(entry: Path) -> None:
        (entry / FILE).write_bytes(_metadata(file, title, context))

    digest = file.sha256
    if not digest:
        return _metadata(file, title, context)
    return (context.store.get_or_build("metadata", digest, extract).path / FILE).read_bytes()


def _metadata(file: LockedFile, title: str, context: LockContext) -> bytes:
    url = file.url
    if not url.startswith("http"):
        return metadata_in(io.BytesIO(_verified(file, _read(file, title, context), title)), title)
    # An index need not have it: some answer 403 to what is not there, or a page.
    with contextlib.suppress(NetworkError):
        answer = fetch(f"{url}.metadata", f"the metadata of {title}", context.site, _METADATA_LIMITS)
        if answer.body.startswith(b"Metadata-Version:"):
            return answer.body
    remote = open_remote(url, title, context.site, _LIMITS)
    return metadata_in(io.BytesIO(_verified(file, remote, title)) if isinstance(remote, bytes) else remote, title)


def metadata_in(wheel: IO[bytes] | io.RawIOBase, title: str) -> bytes:
    """The METADATA in a wheel.

    Raises:
        CheckRefusedError: it is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            # Directly below the top: a wheel may carry the .dist-info of what it vendors deeper down.
            inside = (name for name in archive.namelist() if name.count("/") == 1)
            return archive.read(next(name for name in inside if name.endswith(".dist-info/METADATA")))
    except (*NOT_AN_ARCHIVE, StopIteration) as error:
        raise CheckRefusedError(
            f"the wheel of {title} cannot be read",
            why="It is not a wheel: " + (str(error) or "it has no METADATA."),
            fix="Try again; if it stays, the index or a proxy serves another file. Or choose another version.",
        ) from error


def _read(file: LockedFile, title: str, context: LockContext) -> bytes:
    if file.path:
        path = context.folder / file.path
        try:
            return path.read_bytes()
        except OSError as error:
            raise NetworkError(
                f"cannot read {title}",
                why=f"{path}: {error.strerror}",
                fix="Look whether the folder of find-links has it, then run again.",
            ) from error
    return fetch(file.url, title, context.site, _LIMITS).body
