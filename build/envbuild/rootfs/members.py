"""What a tar of a layer holds: members, their names, and how a name or a member is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from envbuild.core.errors import CheckRefusedError

MAX_NAME_BYTES = 255  # of one part; no file system of Linux takes more
MAX_PATH_BYTES = 4095  # of all parts; no program could open more (PATH_MAX)
MAX_PARTS = 256  # programs that remove or walk trees give up at about a thousand directories in one another
SHOWN_CHARACTERS = 200


class Kind(Enum):
    """What a member is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symbolic link"
    HARD_LINK = "hard link"
    FIFO = "FIFO"
    CHARACTER = "character device"
    BLOCK = "block device"


DEVICES = (Kind.CHARACTER, Kind.BLOCK)


@dataclass(slots=True)
class Member:
    """A member of a layer.

    Names are relative to the root, without ``./`` before and ``/`` behind; bytes that are no UTF-8 are surrogates
    (PEP 383), as in Python's own file names. The root itself is the empty name.
    """

    name: str
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    # Of a symbolic link its text, of a hard link the name of a file that was yielded before.
    link: str = ""
    # The index of its layer, 0 the lowest; -1 for directories without an entry of their own.
    layer: int = -1
    # A layer has the name twice, and this one holds instead of the one that was yielded before.
    replaces: bool = False
    # Names of its extended attributes; what they hold is not kept.
    xattrs: tuple[str, ...] = ()


class Refusal(Exception):  # noqa: N818 - never leaves this package: the caller that knows the layer makes an error of it
    """A member (or, with an empty name, a whole layer) that is not accepted, and why."""

    def __init__(self, name: str, why: str, fix: str = "", *, layer: int | None = None) -> None:
        super().__init__(why)
        self.name = name
        self.why = why
        self.fix = fix
        # The index of its layer, where that is not the one that is being read.
        self.layer = layer


REBUILD = (
    "Build the image again with a builder that writes OCI layers (docker, buildah, kaniko do); or use another image."
)


@contextlib.contextmanager
def refusals(
    title: str, pieces: Iterable[bytes] = (), titles: Sequence[str] = (), fix: str = REBUILD
) -> Iterator[None]:
    """Make errors of refusals in a layer.

    Args:
        pieces: the rest of the layer, read first: that a blob is damaged or another one comes before what it holds.
        titles: of all layers, where a refusal may be about another one.
    """
    try:
        yield
    except Refusal as refusal:
        for _ in pieces:
            pass
        what = f"{title if refusal.layer is None else titles[refusal.layer]} is refused"
        if refusal.name:
            what += f": its member {shown(refusal.name)}"
        raise CheckRefusedError(what, why=refusal.why, fix=refusal.fix or fix) from refusal


def shown(name: str) -> str:
    """A name for people: quoted, control characters and odd bytes escaped, not endless."""
    return repr(name if len(name) <= SHOWN_CHARACTERS else name[:SHOWN_CHARACTERS] + "...")


def tidy_name(name: str, *, absolute: bool = False) -> str:
    """A member's name as it is used here: ``./a//b/`` is ``a/b``.

    Args:
        absolute: take a leading ``/`` away; without it such a name is refused. Some builders write the targets of hard
            links so.

    Raises:
        Refusal: the name leaves the root, or no file can have it.
    """
    if name.startswith("/") and not absolute:
        raise Refusal(name, "The name is absolute; names in a layer are relative to the image's root.")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refusal(name, "The name has '..' in it, which could lead out of the image.")
    tidy = "/".join(parts)
    # The common case is short; only long ones are measured in bytes.
    if len(tidy) > MAX_NAME_BYTES // 4 and (
        len(name_bytes(tidy)) > MAX_PATH_BYTES or any(len(name_bytes(part)) > MAX_NAME_BYTES for part in parts)
    ):
        raise Refusal(name, f"The name is too long: a part has at most {MAX_NAME_BYTES} bytes, all {MAX_PATH_BYTES}.")
    if len(parts) > MAX_PARTS:
        raise Refusal(name, f"It lies in more than {MAX_PARTS - 1} directories in one another.")
    if "\0" in tidy:
        raise Refusal(name, "The name has a NUL byte in it.")
    return tidy


def name_bytes(text: str) -> bytes:
    """A name as a file system has it."""
    return text.encode("utf-8", "surrogateescape")


def parent_of(name: str) -> str:
    """The directory of a name; the root's is the root."""
    return name.rpartition("/")[0]
