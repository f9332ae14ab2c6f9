"""Reads a .sqsh as a stream of members, without unpacking it: what is in it, setuid programs and devices too, is
nowhere a file of this machine.

``sqfs2tar`` (squashfs-tools-ng) does it, which names every compression that the kernel knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.core.process import StreamLimits, find_tool, stream
from envbuild.rootfs.blobs import limited, most_bytes
from envbuild.rootfs.members import Kind, Member, Refusal, refused, tidy_name
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_reader import read_tar

MAGIC = b"hsqs"
# It keeps every name in memory (80 MiB for the 400,000 of a large image), and a hostile file has them without end.
MOST_MEMORY_BYTES = 2 << 30
# Before it prints anything it reads all names.
IDLE_SECONDS = 120.0
FIX = "It is damaged, or was made to do harm: copy or build it again, or use another image."
# sqfs2tar's own words for a name that is not there.
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
        below: a directory of it, when no more is wanted; nothing comes where it has none of that name.

    Raises:
        CheckRefusedError: it is damaged, holds what no image may (a socket, say), or unpacks to more than is honest.
        MachineError: the program is missing, or the file cannot be read.
    """
    with machine_errors(file, "read"), file.open("rb"):
        limit = most_bytes(file.stat().st_size)
    # A tar holds no sockets. What sqfs2tar 1.2 passes over has left its long name behind, for whatever comes next.
    part = ["--no-skip", *(("--keep-as-dir", "--subdir", below) if below else ("--root-becomes", "."))]
    # Absolute: a name that begins with a dash is none of its options.
    words: list[str | Path] = [require_reader(), *part, file.absolute()]
    reading = stream(
        words,
        what=f"read {file}",
        error=CheckRefusedError,
        fix=FIX,
        limits=StreamLimits(memory_bytes=MOST_MEMORY_BYTES, idle_seconds=IDLE_SECONDS),
    )
    with contextlib.closing(reading) as output:
        pieces = limited(output, limit)
        try:
            with _refusing(file, pieces):
                for member, content in read_tar(pieces, limit):
                    if member.kind is Kind.HARD_LINK:
                        member.link = tidy_name(member.link)
                    yield member, content and content.guarded(_refusing(file, pieces))
        except CheckRefusedError as error:
            if not (below and _NO_SUCH_NAME.search(error.why)):
                raise


@contextlib.contextmanager
def _refusing(file: Path, pieces: Iterable[bytes]) -> Iterator[None]:
    """Make an error of a refusal; if the program failed, that comes first: its tar just ends."""
    try:
        yield
    except Refusal as refusal:
        for _ in pieces:
            pass
        fix = refusal.fix or FIX
        raise refused(f"the .sqsh {file}", Refusal(refusal.name, refusal.why, fix)) from refusal
