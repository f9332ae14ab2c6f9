"""What compiled files really contain: GPU architectures, needed libraries, the glibc they ask for.

GPU code lies in the sections ``.nv_fatbin`` and ``__nv_relfatbin``: containers, each with one entry for each
architecture. NVIDIA does not document the form; the fields used here were read from what nvcc 13.0 writes and compared
with ``cuobjdump --list-elf --list-ptx`` of 13.4 (a test compiles and compares). Anything else in there is refused: a
wheel whose content is not understood is not kept.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.architectures import Architectures

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
# magic, version, length of this header, length of the entries after it
_CONTAINER = struct.Struct("<IHHQ")
# kind, version, length of this header, length of the code after it (padded)
_ENTRY = struct.Struct("<HHIQ")
SM_OFFSET, FLAGS_OFFSET = 28, 40
PTX_KIND, SASS_KIND = 1, 2
# Bits of an entry's flags: sm_90a, sm_100f.
SPECIFIC, FAMILY = 1 << 20, 1 << 21


@dataclass(frozen=True, kw_only=True)
class Binary:
    """An ELF file.

    Attributes:
        libraries: the sonames it needs.
        glibc: the newest glibc version whose symbols it uses, such as ``2.34``; empty without any.
    """

    name: str
    architectures: Architectures
    libraries: tuple[str, ...]
    glibc: str


def read_binary(name: str, content: bytes) -> Binary:
    """Read an ELF file.

    Raises:
        CheckRefusedError: it is none, or its GPU code is of a form that is not known.
    """
    try:
        elf = ELFFile(io.BytesIO(content))
        sections = [elf.get_section_by_name(section) for section in SECTIONS]
        found = Architectures()
        for section in sections:
            if section is not None:
                found += fatbin(section.data(), name)
        return Binary(name=name, architectures=found, libraries=_libraries(elf), glibc=_glibc(elf))
    except (ELFError, struct.error) as error:
        raise _refused(name, f"It is no ELF file that can be read: {error}") from error


def fatbin(data: bytes, name: str) -> Architectures:
    """The architectures in a section of fat binaries.

    Raises:
        CheckRefusedError: its form is not known.
    """
    sass: list[str] = []
    ptx: list[str] = []
    for kind, sm in _entries(data, name):
        if kind not in (PTX_KIND, SASS_KIND):
            raise _refused(name, f"Its GPU code has an entry of the unknown kind {kind} for sm_{sm}.")
        (sass if kind == SASS_KIND else ptx).append(sm)
    return Architectures.of(sass, ptx)


def _entries(data: bytes, name: str) -> Iterator[tuple[int, str]]:
    at = 0
    while at + _CONTAINER.size <= len(data):
        magic, _, header, length = _CONTAINER.unpack_from(data, at)
        if magic == 0:
            at += 4  # padding between containers
            continue
        end = at + header + length
        if magic != MAGIC or header < _CONTAINER.size or end > len(data):
            raise _refused(name, f"Its GPU code is of an unknown form at byte {at} (magic {magic:#x}).")
        at += header
        while at < end:
            kind, _, header, length = _ENTRY.unpack_from(data, at)
            (sm,) = struct.unpack_from("<I", data, at + SM_OFFSET)
            (flags,) = struct.unpack_from("<Q", data, at + FLAGS_OFFSET)
            if header < FLAGS_OFFSET + 8 or at + header + length > end:
                raise _refused(name, f"Its GPU code has an entry of an unknown form at byte {at}.")
            yield kind, f"{sm}{'a' if flags & SPECIFIC else 'f' if flags & FAMILY else ''}"
            at += header + length


def _libraries(elf: ELFFile) -> tuple[str, ...]:
    dynamic = elf.get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return ()
    return tuple(sorted(str(getattr(tag, "needed", "")) for tag in dynamic.iter_tags("DT_NEEDED")))


def _glibc(elf: ELFFile) -> str:
    versions = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(versions, GNUVerNeedSection):
        return ""
    names = [str(needed.name) for _, entries in versions.iter_versions() for needed in entries]
    numbers = [name.removeprefix("GLIBC_") for name in names if name.startswith("GLIBC_2.")]
    return max(numbers, key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """Sorts version numbers such as ``2.4`` and ``2.34``."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def read_wheel(wheel: Path) -> tuple[Binary, ...]:
    """Every ELF file in a wheel.

    Raises:
        CheckRefusedError: the wheel or a file in it cannot be read.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = []
            for name in sorted(archive.namelist()):
                with archive.open(name) as stream:
                    if stream.read(4) == b"\x7fELF":
                        found.append(read_binary(name, archive.read(name)))
            return tuple(found)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise _refused(wheel.name, f"It is no wheel that can be read: {error}") from error


def _refused(name: str, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"{name} cannot be kept: what it contains is not understood",
        why=why,
        fix="Build it again; if it stays, the compiler is newer than what envbuild knows: take the CUDA toolkit of the "
        "lock's CUDA version, or a newer envbuild.",
    )
