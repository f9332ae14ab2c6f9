"""The GPU code of what is installed: whether packages that were not compiled here run on a target.

Wheels from an index have code for the SMs that their makers chose: torch, NCCL and the core of Transformer Engine must
contain the target's. What is read is the fat binaries of every installed ELF file, header by header. Some libraries of
NVIDIA keep part of their kernels in forms of their own (cuFFT all of them), and bare cubins are not read: of a package
in which nothing is found nothing is known.
"""

from __future__ import annotations

import csv
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from packaging.utils import canonicalize_name

from envbuild.catalog.fields import TomlModel
from envbuild.core.digests import Json, digest_of, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.binary import ELF_MAGIC
from envbuild.wheels.audit.fatbin import PTX_KIND, SASS_KIND, SECTIONS, entries

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

KIND = "gpu-code"
FILE = "gpu-code.json"
# Raised when the same files would be read otherwise.
FORMAT = 1


class FileCode(TomlModel):
    """The GPU code in a file; no entries without kernels."""

    file: str
    sm: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    size_bytes: int = 0
    unknown: str = ""

    @property
    def architectures(self) -> Architectures:
        """What it has code for."""
        return Architectures.named(self.sm, self.ptx)


class PackageCode(TomlModel):
    """A package and its files with GPU code."""

    package: str
    version: str
    files: tuple[FileCode, ...] = ()

    @property
    def architectures(self) -> Architectures:
        """What all of its files together have code for."""
        return sum((file.architectures for file in self.files), Architectures())

    @property
    def main_file(self) -> FileCode:
        """The file with the most GPU code: torch's libtorch_cuda.so, and not the few kernels of its others."""
        return max(self.files, key=lambda file: file.size_bytes, default=FileCode(file=""))

    @property
    def unknown(self) -> str:
        """Why nothing can be said of it; empty where something can."""
        return next((f"{file.file}: {file.unknown}" for file in self.files if file.unknown), "")

    def as_json(self, sm: tuple[str, ...]) -> Json:
        """What ``--json`` has of it for a target's SMs."""
        architectures = self.architectures
        result: dict[str, Json] = {"package": self.package, "version": self.version}
        result |= {
            "sm": list(architectures.sass),
            "ptx": list(architectures.ptx),
            "files_lacking": list(files_without(self, sm)),
        }
        return result | ({"unknown": self.unknown} if self.unknown else {})


class InstalledCode(TomlModel):
    """The packages of an environment that have GPU code, or whose GPU code cannot be read, and those that
    nothing runs without.
    """

    packages: tuple[PackageCode, ...]


# Without them nothing runs; the pattern is over canonical names. Of others it is not known what they need: torch 2.7.0
# has code for sm_75, and requires nvidia-cusparselt-cu12 0.6.3, which has none.
REQUIRED = re.compile(r"^(torch|nvidia-nccl(-cu\d+)?|transformer-engine-cu\d+)$")


def site_packages_of(environment: Path) -> Path:
    """The folder of packages of a virtual environment."""
    return next(iter(sorted((environment / "lib").glob("python3.*/site-packages"))), environment)


def check_prebuilt(
    site_packages: Path, sm: tuple[str, ...], store: LocalStore, reporter: Reporter
) -> tuple[PackageCode, ...]:
    """The packages of an environment that have GPU code; notes what does not run on the target.

    Args:
        site_packages: of an environment, or of the root file system of an image.
        sm: the target's SMs; without any (a target without GPUs) nothing is read.

    Raises:
        CheckRefusedError: a package without which nothing runs lacks code for an SM of the target.
    """
    if not sm:
        return ()
    packages = installed_code(site_packages, store, reporter).packages
    refused = []
    for package in packages:
        lacking = lacks(package, sm)
        if package.unknown:
            reporter.note(f"GPU code of {package.package} {package.version}: nothing is known: {package.unknown}")
        elif lacking and REQUIRED.match(package.package):
            refused.append(_words(package, lacking))
        elif lacking:
            reporter.note(f"GPU code of {_words(package, lacking)}")
        elif files := files_without(package, sm):
            reporter.note(
                f"GPU code of {package.package} {package.version}: not for every SM of the target: {', '.join(files)}"
            )
    if refused:
        raise CheckRefusedError(
            f"what is installed does not run on the target's GPUs ({', '.join(f'sm_{one}' for one in sm)})",
            why="\n".join(refused),
            fix="Take versions or builds of these packages that have code for the target (a newer one for newer GPUs, "
            "an older one for GPUs that were dropped), and lock again; or choose another target: "
            "`envbuild list targets`.",
        )
    return packages


def lacks(package: PackageCode, sm: tuple[str, ...]) -> tuple[str, ...]:
    """The SMs for which a package has nothing that runs; of one without which nothing runs, its main file counts."""
    code = package.main_file.architectures if REQUIRED.match(package.package) else package.architectures
    return tuple(one for one in sm if not code.runs_on(one))


def files_without(package: PackageCode, sm: tuple[str, ...]) -> tuple[str, ...]:
    """The files with GPU code that do not run on every SM."""
    return tuple(one.file for one in package.files if not all(one.architectures.runs_on(wanted) for wanted in sm))


def _words(package: PackageCode, lacking: tuple[str, ...]) -> str:
    main = package.main_file
    has = f"{main.file} has {main.architectures.text()}" if main.file else "no file of it has GPU code"
    return f"{package.package} {package.version}: nothing for {', '.join(f'sm_{one}' for one in lacking)}; {has}."


def installed_code(site_packages: Path, store: LocalStore, reporter: Reporter) -> InstalledCode:
    """The GPU code of an environment; read once for the same files."""
    with machine_errors(site_packages, "read"):
        listed = list(_listed(site_packages))
    files: list[Json] = [[*row] for row in sorted(listed)]

    def build(folder: Path) -> None:
        with reporter.step("read the GPU code of what is installed"), machine_errors(site_packages, "read"):
            write_atomic(folder / FILE, _read(site_packages, listed).model_dump_json(indent=1) + "\n")

    key = digest_of({"format": FORMAT, "files": files})
    # A read-only cache (a shared one on a cluster) has nothing written to it; what is read is not kept then.
    if not store.is_writable and store.find(KIND, key) is None:
        return _read(site_packages, listed)
    entry = store.get_or_build(KIND, key, build)
    return InstalledCode.model_validate_json((entry.path / FILE).read_bytes())


def _listed(site_packages: Path) -> Iterator[tuple[str, str, str, str]]:
    """Package, version, path and digest of each file that may be an ELF file, from the packages' lists (PEP 376)."""
    for info in sorted(site_packages.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        record = info / "RECORD"
        if not record.is_file():
            continue
        with record.open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream):
                path = row[0] if row else ""
                last = path.rpartition("/")[2]
                # Scripts lie outside of the folder (../../../bin/x); executables have no dot.
                if (".so" in last or "." not in last) and not path.startswith((info.name, "..", "/")):
                    file = site_packages / path
                    # RECORD's digest as it stands: an environment with torch has 4.5 GB.
                    digest = row[1] or (sha256_file(file) if file.is_file() else "")
                    yield canonicalize_name(name), version, path, digest


def _read(site_packages: Path, listed: list[tuple[str, str, str, str]]) -> InstalledCode:
    code_of: dict[tuple[str, str], list[FileCode]] = {}
    for package, version, path, _ in listed:
        code = _code(site_packages / path, path)
        if code is not None:
            code_of.setdefault((package, version), []).append(code)
        # Without GPU code it is listed all the same, so that it is refused: a CPU build of torch, say.
        elif REQUIRED.match(package):
            code_of.setdefault((package, version), [])
    packages = (
        PackageCode(package=name, version=version, files=tuple(files)) for (name, version), files in code_of.items()
    )
    return InstalledCode(packages=tuple(packages))


def _code(path: Path, name: str) -> FileCode | None:
    """The GPU code of a file; None where it has none. Of files of gigabytes only the headers are read."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        if stream.read(len(ELF_MAGIC)) != ELF_MAGIC:
            return None
        return read_code(stream, name)


def read_code(stream: BinaryIO, name: str) -> FileCode | None:
    """The GPU code of an open ELF file; None where it has none."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _code_in(ELFFile(stream), data, name)
        except CheckRefusedError as error:
            return FileCode(file=name, unknown=error.why)
        except (ELFError, struct.error) as error:
            return FileCode(file=name, unknown=f"it is not a readable ELF file: {error}")


def _code_in(elf: ELFFile, data: mmap.mmap, name: str) -> FileCode | None:
    sm: dict[int, list[str]] = {SASS_KIND: [], PTX_KIND: []}
    size = 0
    for section in map(elf.get_section_by_name, SECTIONS):
        if section is None:
            continue
        start = section["sh_offset"]
        # Released here: closing a map fails with BufferError as long as there is a view of it.
        with memoryview(data) as whole, whole[start : start + section["sh_size"]] as part:
            for entry in entries(part, name):
                if entry.has_kernels:
                    size += entry.size_bytes
                    sm[entry.kind].append(entry.sm)
    if not size:
        return None
    architectures = Architectures.named(sm[SASS_KIND], sm[PTX_KIND])
    return FileCode(file=name, sm=architectures.sass, ptx=architectures.ptx, size_bytes=size)
