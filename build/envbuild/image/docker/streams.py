"""Tars made while they are sent: nothing of them lies on a disk."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors

CHUNK_BYTES = 1 << 20
Content = bytes | Path


def tar_stream(files: Mapping[str, Content]) -> Iterator[bytes]:
    """A tar of files, by their names in it; times and owners are those of nobody.

    Raises:
        CheckRefusedError: a file changed while it was read.
    """
    for name in sorted(files):
        content = files[name]
        member = tarfile.TarInfo(name)
        if isinstance(content, bytes):
            member.mode, member.size = 0o644, len(content)
            yield member.tobuf(tarfile.GNU_FORMAT) + content
        else:
            with machine_errors(content, "read"):
                info = content.stat()
                member.mode, member.size = 0o755 if info.st_mode & 0o100 else 0o644, info.st_size
                yield member.tobuf(tarfile.GNU_FORMAT)
                yield from _read(content, info.st_size)
        yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _read(file: Path, size: int) -> Iterator[bytes]:
    left = size
    with file.open("rb") as stream:
        while left and (chunk := stream.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
    if left:
        raise CheckRefusedError(
            f"{file} became shorter while it was read",
            why=f"{left} bytes of {size} are missing.",
            fix="Run the same command again when nobody writes to it.",
        )
