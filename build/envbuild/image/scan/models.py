"""What is known about a layer after it was read: its entries, packages, credentials and GPU code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from envbuild.catalog.fields import TomlModel
from envbuild.core.files import machine_errors
from envbuild.image.scan.packages import DebianPackage, PythonPackage
from envbuild.wheels.audit.prebuilt import FileCode

# Raised when the same layer would be read otherwise.
FORMAT = 1
# Libraries of which a process must load one copy: the family by the file's name. Wheels may have renamed theirs.
_HASH = r"(-[0-9a-f]{8})?"
FAMILIES = {
    "cuDNN": re.compile(rf"^libcudnn(_[a-z_]+)?{_HASH}\.so(\.|$)"),
    "NCCL": re.compile(rf"^libnccl{_HASH}\.so(\.|$)"),
    "torch": re.compile(rf"^lib(torch(_cpu|_cuda|_python)?|c10(_cuda)?){_HASH}\.so(\.|$)"),
}


class FileEntry(NamedTuple):
    """An entry of a layer.

    Attributes:
        kind: ``f``, ``d``, ``l`` (symbolic link), ``h`` (hard link), ``c``, ``b`` or ``p``.
        link: what a link points to; of a hard link the file's name.
        digest: sha256 of a file's content, in hex.
        xattrs: names of extended attributes.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    link: str = ""
    digest: str = ""
    xattrs: tuple[str, ...] = ()


class Special(TomlModel):
    """An entry with special rights."""

    path: str
    kind: str
    mode: int
    capabilities: bool = False
    owned: bool = Field(default=False, description="a Debian package of the same layer brings it")


class Hit(TomlModel):
    """Something found in a file.

    Attributes:
        vouched: the file has the digest that its wheel or its Debian package states: it is as published.
    """

    path: str
    what: str
    vouched: bool = False


class GpuFile(TomlModel):
    """A file with GPU code, and the package that brings it; empty where no package lists the file."""

    package: str
    version: str
    code: FileCode


class LayerScan(TomlModel):
    entries: int
    files: int
    file_bytes: int
    python: tuple[PythonPackage, ...] = ()
    debian: tuple[DebianPackage, ...] | None = None
    special: tuple[Special, ...] = ()
    secrets: tuple[Hit, ...] = ()
    places: tuple[Hit, ...] = ()
    gpu: tuple[GpuFile, ...] = ()
    libraries: dict[str, tuple[str, ...]] = Field(default_factory=dict, description="paths by family")


def read_listing(listing: Path) -> Iterator[FileEntry]:
    """The entries of a listing, in the layer's order."""
    # JSON escapes all but ASCII, surrogates of names that are not UTF-8 too.
    with machine_errors(listing, "read"), listing.open(encoding="ascii") as lines:
        for line in lines:
            *values, xattrs = json.loads(line)
            yield FileEntry._make([*values, tuple(xattrs)])
