"""What is read from an ELF file: GPU architectures, needed libraries, versions and symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.wheels.architectures import Architectures

ELF_MAGIC = b"\x7fELF"


@dataclass(frozen=True)
class Symbols:
    """What a file brings to others, and what it must find in others. Weak ones may be missing."""

    exported: frozenset[str] = frozenset()
    undefined: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Binary:
    """An ELF file.

    Attributes:
        libraries: the sonames it needs.
        versions: versions of symbols that it needs, by the soname that has them: ``libc.so.6`` -> ``GLIBC_2.34``.
        machine: as uname says it; empty for GPU code.
        processor: what it asks of processors beyond what all of the machine have; empty for nothing.
    """

    name: str
    architectures: Architectures
    libraries: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    machine: str = "x86_64"
    processor: str = ""
    symbols: Symbols = field(default_factory=Symbols)

    def newest(self, prefix: str) -> str:
        """The newest version of symbols with a prefix, such as ``2.34`` for ``GLIBC``; empty without any."""
        names = [name for names in self.versions.values() for name in names]
        numbers = [name.removeprefix(f"{prefix}_") for name in names if name.startswith(f"{prefix}_")]
        # GLIBC_PRIVATE and GLIBC_ABI_DT_RELR are versions without a number.
        return max((number for number in numbers if version_key(number)), key=version_key, default="")


def version_key(version: str) -> tuple[int, ...]:
    """Sorts version numbers such as ``2.4`` and ``2.34``; empty for words."""
    # Not packaging's Version: GLIBC_PRIVATE and the like have to sort too, as empty.
    return tuple(int(part) for part in version.split(".") if part.isdigit())
