"""GPU code in ELF sections: containers ("fat binaries"), each with one entry for each architecture.

It lies in the sections ``.nv_fatbin`` and ``__nv_relfatbin``. NVIDIA does not document the form; the fields used here
were read from what nvcc 13.0 writes and compared with ``cuobjdump --list-elf --list-ptx`` of 13.4 (a test compiles and
compares). Data is read where it lies: of code, only the headers are touched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.architectures import Architectures

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
# magic, version, length of this header, length of the entries after it
_CONTAINER = struct.Struct("<IHHQ")
# kind, version, length of this header, length of the code after it (padded)
_ENTRY = struct.Struct("<HHIQ")
# The rest of an entry's header: little-endian, at these bytes of it.
SM_OFFSET, FLAGS_OFFSET, PLAIN_SIZE_OFFSET = 28, 40, 56
LEAST_HEADER = PLAIN_SIZE_OFFSET + 8
PTX_KIND, SASS_KIND = 1, 2
# Bits of an entry's flags: sm_90a, sm_100f.
SPECIFIC, FAMILY = 1 << 20, 1 << 21
# Every file that nvcc links has an entry without a kernel for whatever it was told, or sm_75 (sm_52 of CUDA 12) where
# it was told nothing: cuFFT, whose kernels are elsewhere, has that and nothing more. Unpacked and without a kernel,
# nvcc 13.0's are up to 1736 bytes, and 2744 from sm_100 on; its smallest kernels 2688, and 4888. PTX without
# a kernel is 57 bytes, and with one 89 (a test compiles both).
KERNEL_BYTES, KERNEL_BYTES_SM_100, KERNEL_BYTES_PTX = 2000, 3600, 64


@dataclass(frozen=True, kw_only=True)
class FatbinEntry:
    """One entry of a container.

    Attributes:
        kind: :data:`SASS_KIND`, :data:`PTX_KIND`, or something else.
        sm: its SM version, such as ``90`` or ``100a``.
        size_bytes: as it lies there; ``plain_bytes``: unpacked.
    """

    kind: int
    sm: str
    size_bytes: int
    plain_bytes: int

    @property
    def has_kernels(self) -> bool:
        """Whether it is large enough to hold a kernel."""
        if self.kind == PTX_KIND:
            return self.plain_bytes >= KERNEL_BYTES_PTX
        if self.kind == SASS_KIND:
            return self.plain_bytes >= (KERNEL_BYTES if int(self.sm.rstrip("af")) < 100 else KERNEL_BYTES_SM_100)
        return False  # code for the linker, say, runs nowhere by itself


def fatbin(data: bytes | memoryview, name: str) -> Architectures:
    """The architectures in a section of fat binaries.

    Raises:
        CheckRefusedError: its form is not known.
    """
    code: dict[int, list[str]] = {SASS_KIND: [], PTX_KIND: []}
    for entry in entries(data, name):
        if entry.kind not in code:
            raise not_understood(name, f"Its GPU code has an entry of the unknown kind {entry.kind} for sm_{entry.sm}.")
        code[entry.kind].append(entry.sm)
    return Architectures.named(code[SASS_KIND], code[PTX_KIND])


def entries(data: bytes | memoryview, name: str) -> Iterator[FatbinEntry]:
    """Every entry of a section.

    Raises:
        CheckRefusedError: its form is not known.
    """
    at = 0
    while at + _CONTAINER.size <= len(data):
        magic, _, header, length = _CONTAINER.unpack_from(data, at)
        if magic == 0:
            at += 4  # padding between containers
            continue
        end = at + header + length
        if magic != MAGIC or header < _CONTAINER.size or end > len(data):
            raise not_understood(name, f"Its GPU code is of an unknown form at byte {at} (magic {magic:#x}).")
        at += header
        while at < end:
            header, length = _lengths(data, at, end, name)
            yield _entry(data, at, length)
            at += header + length


def _lengths(data: bytes | memoryview, at: int, end: int, name: str) -> tuple[int, int]:
    if at + LEAST_HEADER <= end:
        _, _, header, length = _ENTRY.unpack_from(data, at)
        if header >= LEAST_HEADER and at + header + length <= end:
            return header, length
    raise not_understood(name, f"Its GPU code has an entry of an unknown form at byte {at}.")


def _entry(data: bytes | memoryview, at: int, length: int) -> FatbinEntry:
    (kind,) = struct.unpack_from("<H", data, at)
    (sm,) = struct.unpack_from("<I", data, at + SM_OFFSET)
    (flags,) = struct.unpack_from("<Q", data, at + FLAGS_OFFSET)
    (plain,) = struct.unpack_from("<Q", data, at + PLAIN_SIZE_OFFSET)  # 0 where it is not packed
    suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
    return FatbinEntry(kind=kind, sm=f"{sm}{suffix}", size_bytes=length, plain_bytes=plain or length)


def not_understood(name: str, why: str) -> CheckRefusedError:
    """The error for a compiled file that cannot be read."""
    return CheckRefusedError(
        f"{name} cannot be kept: what it contains is not understood",
        why=why,
        fix="Build it again; if it stays, the compiler is newer than what envbuild knows: take the CUDA toolkit of the "
        "lock's CUDA version, or a newer envbuild.",
    )
