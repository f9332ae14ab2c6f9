"""What compiled files really contain: GPU architectures, needed libraries, versions and symbols they ask for.

A file that is not understood is refused: a wheel whose content is not known is not kept.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import NoteSection

from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.binary import ELF_MAGIC, Binary
from envbuild.wheels.audit.fatbin import SECTIONS, fatbin, not_understood
from envbuild.wheels.audit.symbols import read_symbols

# pyelftools' names of machines, in uname's words. Bare GPU code (a cubin) is an ELF file too.
MACHINE_NAMES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_CUDA": ""}
# Bits of GNU_PROPERTY_X86_ISA_1_NEEDED (x86-64 psABI): what every processor has, then v2, v3, v4.
_ISA_LEVELS = {2: "x86-64-v2", 4: "x86-64-v3", 8: "x86-64-v4"}


def read_binary(name: str, content: bytes) -> Binary:
    """Read an ELF file.

    Raises:
        CheckRefusedError: it is none, or its GPU code is of a form that is not known.
    """
    try:
        elf = ELFFile(io.BytesIO(content))
        architectures = Architectures()
        for section in map(elf.get_section_by_name, SECTIONS):
            if section is not None:
                architectures += fatbin(section.data(), name)
        machine = str(elf["e_machine"])
        return Binary(
            name=name,
            architectures=architectures,
            libraries=_libraries(elf),
            versions=_versions(elf),
            machine=MACHINE_NAMES.get(machine, machine),
            processor=_processor(elf),
            symbols=read_symbols(elf),
        )
    except (ELFError, struct.error) as error:
        raise not_understood(name, f"It is not a readable ELF file: {error}") from error


def _libraries(elf: ELFFile) -> tuple[str, ...]:
    dynamic = elf.get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return ()
    return tuple(sorted(str(getattr(tag, "needed", "")) for tag in dynamic.iter_tags("DT_NEEDED")))


def _versions(elf: ELFFile) -> dict[str, tuple[str, ...]]:
    # Symbol versions that the file needs, by library (LSB Core, "Symbol Versioning").
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return {}
    return {
        str(needed.name): tuple(str(version.name) for version in versions)
        for needed, versions in section.iter_versions()
    }


def _processor(elf: ELFFile) -> str:
    properties = elf.get_section_by_name(".note.gnu.property")
    if not isinstance(properties, NoteSection):
        return ""
    for note in properties.iter_notes():
        for entry in note["n_desc"] if note["n_type"] == "NT_GNU_PROPERTY_TYPE_0" else ():
            if entry.pr_type == "GNU_PROPERTY_X86_ISA_1_NEEDED":
                levels = [name for bit, name in _ISA_LEVELS.items() if entry.pr_data & bit]
                return levels[-1] if levels else ""
    return ""


def read_wheel(wheel: Path) -> tuple[Binary, ...]:
    """Every ELF file in a wheel.

    Raises:
        CheckRefusedError: the wheel or a file in it cannot be read.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            binaries = []
            for name in sorted(archive.namelist()):
                with archive.open(name) as stream:
                    # By content, not by name: executables have no suffix, and text files may end with .so.
                    if stream.read(4) == ELF_MAGIC:
                        binaries.append(read_binary(name, archive.read(name)))
            return tuple(binaries)
    # zipfile ends with EOFError where a member is cut short.
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise not_understood(wheel.name, f"It is not a readable wheel: {error}") from error
