"""The symbols of torch that compiled files ask for, and whether the locked environment has them.

A wheel that was compiled against another torch asks for symbols that the locked one does not have. Loading it would say
so, but loading says one thing only: where NVIDIA's driver is missing it says that, and nothing of torch. So the tables
of symbols are compared.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from envbuild.wheels.audit.binary import Binary, Symbols

# An entry of a 64-bit table of symbols (ELF-64 Object File Format, "Symbol Table").
_SYMBOL = struct.Struct("<IBBHQQ")
_LOCAL, _WEAK = 0, 2
# STV_INTERNAL and STV_HIDDEN: in the table, and not for other files.
_HIDDEN = (1, 2)
# Its namespaces where a nested name begins (Itanium C++ ABI, "Mangling"; a function may well be called `at`), and its
# C names.
_OF_TORCH = re.compile(r"^_Z.*?N[rVK]*[RO]?(?:3c10|2at|5torch|6caffe2)(?!E)|^(?:aoti_torch|torch)_|^THP[A-Z]")


def read_symbols(elf: ELFFile) -> Symbols:
    """The dynamic symbols of an ELF file; none for one that is not linked, or not of 64 bits."""
    table, texts = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynstr")
    if table is None or texts is None or elf.elfclass != 64:
        return Symbols()
    text: bytes = texts.data()
    exported, undefined = set(), set()
    # By hand: pyelftools' iter_symbols takes 7 to 19 times as long (libLLVM, 46,000 symbols: 5.5 s for 0.6 s).
    for at, info, other, section, _, _ in _SYMBOL.iter_unpack(table.data()):
        bind = info >> 4
        name = text[at : text.index(b"\0", at)]
        # SHN_UNDEF is 0: another file has to have it.
        if section:
            if bind != _LOCAL and other & 3 not in _HIDDEN:
                exported.add(name)
        elif bind not in (_LOCAL, _WEAK):
            undefined.add(name)
    return Symbols(frozenset(map(_text, exported)), frozenset(map(_text, undefined)))


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def missing_of_torch(
    binaries: Sequence[Binary], site_packages: Path, foreign: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """The symbols of torch that nothing has, by the name of the file that asks for them.

    Args:
        site_packages: of the locked environment.
        foreign: how names of symbols begin that another package of phase compile brings.
    """
    own = {name for binary in binaries for name in binary.symbols.exported}
    wanted = {
        binary.name: {
            name
            for name in binary.symbols.undefined - own
            if _OF_TORCH.search(name) and not is_foreign_symbol(name, foreign)
        }
        for binary in binaries
    }
    left = set().union(*wanted.values())
    for library in _libraries(site_packages):
        # Without names to look for the rest of gigabytes of libraries stays unread.
        if not left:
            break
        left -= _exported(library)
    return {file: tuple(sorted(names & left)) for file, names in wanted.items() if names & left}


def is_foreign_symbol(name: str, beginnings: Sequence[str]) -> bool:
    """Whether a symbol is one that another package brings, by how its name begins."""
    # A C++ function outside namespaces is _Z, the length of its name, and its name (Itanium C++ ABI, "Mangling").
    return re.sub(r"^_Z\d+", "", name).startswith(tuple(beginnings))


def _libraries(site_packages: Path) -> Iterator[Path]:
    """Torch's libraries, then all others: most symbols are found without reading those."""
    first = site_packages / "torch" / "lib"
    yield from shared_libraries(first)
    for path in shared_libraries(site_packages):
        if path.parent != first:
            yield path


def shared_libraries(folder: Path) -> Iterable[Path]:
    """All shared libraries below a folder, by their names: versioned sonames too (libcudart.so.13)."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if ".so" in name:
                yield Path(place, name)


def _exported(library: Path) -> frozenset[str]:
    # Text files may be named so too; what cannot be read brings nothing.
    with contextlib.suppress(ELFError, struct.error, ValueError), library.open("rb") as stream:
        return read_symbols(ELFFile(stream)).exported
    return frozenset()
