"""Reads a .sqsh as a stream of members with ``sqfs2tar`` (squashfs-tools-ng), which reads every compression.

It is not unpacked: its setuid programs and devices never become files of this machine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.core.process import StreamLimits, find_tool, stream
from envbuild.rootfs.blobs import limited, most_bytes
from envbuild.rootfs.members import Kind, Member, refusals, tidy_name
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_reader import read_tar

MAGIC = b"hsqs"
# It keeps every name in memory (80 MiB for the 400,000 of a large image); a hostile file may have any number.
MOST_MEMORY_BYTES = 2 << 30
# Before it prints anything it reads all names.
IDLE_SECONDS = 120.0
FIX = "It is damaged, or was made to do harm: copy or build it again, or use another image."
# sqfs2tar's message for a name that the file does not have.
_NO_SUCH_NAME = re.compile(r"no such file or directory", re.IGNORECASE)


def require_reader() -> Path:
    """The program that reads a .sqsh.

    Raises:
        MachineError: it is not installed.
    """
    return find_tool("sqfs2tar", "squashfs-tools-ng")


def members_of_sqsh(file: Path, below: str = "") -> Generator[tuple[Member, Content | None]]:
    """The members of a .sqsh; a file's content must be read before the next member.

    Args:
        below: a directory of it, when no more is wanted; nothing where it has no such name.

    Raises:
        CheckRefusedError: it is damaged, holds what no image may (a socket, say), or unpacks to too much.
        MachineError: the program is missing, or the file cannot be read.
    """
    # Opened for nothing but the machine's own error: as sqfs2tar reports it, the file would be called damaged.
    with machine_errors(file, "read"), file.open("rb"):
        limit = most_bytes(file.stat().st_size)
    # A tar has no sockets. sqfs2tar 1.2 writes the long name of what it skips before the next member.
    part = ["--no-skip", *(("--keep-as-dir", "--subdir", below) if below else ("--root-becomes", "."))]
    # Absolute: a name that begins with a dash is not read as an option.
    words: list[str | Path] = [require_reader(), *part, file.absolute()]
    reading = stream(
        words,
        what=f"read {file}",
        error=CheckRefusedError,
        fix=FIX,
        limits=StreamLimits(memory_bytes=MOST_MEMORY_BYTES, idle_seconds=IDLE_SECONDS),
    )
    with contextlib.closing(reading) as output:
        # If the program failed, its own error comes first: its tar is cut short.
        title, pieces = f"the .sqsh {file}", limited(output, limit)
        try:
            with refusals(title, pieces, fix=FIX):
                for member, content in read_tar(pieces):
                    if member.kind is Kind.HARD_LINK:
                        member.link = tidy_name(member.link)
                    yield member, content and content.guarded(refusals(title, pieces, fix=FIX))
        except CheckRefusedError as error:
            if not (below and _NO_SUCH_NAME.search(error.why)):
                raise
