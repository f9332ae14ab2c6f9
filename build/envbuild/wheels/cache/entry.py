"""An entry of the wheelhouse: a wheel, the record of what it is, who built it, and the log of its build."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import Field, ValidationError

from envbuild import __version__
from envbuild.catalog.fields import TomlModel
from envbuild.core.digests import digest_of, sha256_file, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import mask
from envbuild.core.files import machine_errors, read_plain, write_atomic
from envbuild.core.validation import describe_errors
from envbuild.store.entry_index import ENTRY_INDEX_FILE
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.key import OF_THE_MACHINE, KeyParts

KIND = "wheels"
# Builds that have not come to their end, by key: sources and object files.
BUILDS_KIND = "wheel-builds"
# The environments that wheels are compiled in.
ENVIRONMENTS_KIND = "build-environments"
RECORD_FILE = "wheel.json"
LOG_FILE = "build.log"
PROVENANCE_FILE = "provenance.json"
INDEX_DIGITS = 16
MOST_RECORD_BYTES = 16 << 20


class WheelRecord(TomlModel):
    """``wheel.json``: where a wheel comes from and what it was found to contain."""

    schema_: Literal["envbuild.wheel/1"] = Field(alias="schema", default="envbuild.wheel/1")
    key: str = Field(description="sha256 over the parts")
    parts: KeyParts
    file: str = Field(description="the wheel's file name")
    digest: str = Field(description="sha256 of the wheel")
    size_bytes: int
    sm: tuple[str, ...] = Field(description="machine code found in it, by SM")
    ptx: tuple[str, ...] = Field(description="PTX found in it, by SM")
    libraries: tuple[str, ...] = Field(description="shared libraries it needs")
    glibc: str = Field(description="newest glibc symbols it uses")
    libstdcxx: str = Field(default="", description="newest GLIBCXX symbols it uses")
    policy: str = Field(default="", description="the manylinux policy it qualifies for; empty: none")
    not_manylinux: tuple[str, ...] = Field(default=(), description="why it qualifies for none")
    imported: tuple[str, ...] = Field(description="modules that imported when it was checked")
    not_imported: dict[str, str] = Field(description="modules and libraries that could not be loaded there, and why")
    build_seconds: float = Field(description="wall time of the build")
    jobs: int = Field(description="compilers at once")


class Provenance(TomlModel):
    """``provenance.json``: who built a wheel. No path and no name of a machine is in it."""

    schema_: Literal["envbuild.provenance/1"] = Field(alias="schema", default="envbuild.provenance/1")
    envbuild: str = Field(description="the version that built it")
    built: str = Field(description="when, UTC")
    lock: str = Field(description="digest of the lock that it was built for; empty where none was named")
    toolchain: dict[str, str] = Field(description="the compilers' versions")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A wheel in the wheelhouse, and what this call did for it.

    Attributes:
        built: this call built it.
        fetched: the remote store that this call took it from.
        pushed: what became of it in each remote store that it was pushed to.
    """

    path: Path
    record: WheelRecord
    built: bool = False
    fetched: str = ""
    pushed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def wheel(self) -> Path:
        """The wheel's file, which has the name that the record states."""
        return self.path / self.record.file

    def provenance(self) -> Provenance | None:
        """Who built it; None where that was not written down."""
        try:
            return Provenance.model_validate_json((self.path / PROVENANCE_FILE).read_bytes())
        except (OSError, ValidationError):
            return None


def fill(folder: Path, wheel: Path, record: WheelRecord, log: Path) -> None:
    """Put a checked wheel with its record and log into the folder that becomes an entry."""
    with machine_errors(folder):
        shutil.copy2(wheel, folder / record.file)
        if log.is_file():
            shutil.copy2(log, folder / LOG_FILE)
        (folder / RECORD_FILE).write_text(record.model_dump_json(by_alias=True, indent=1) + "\n")
        # The entry appears by a rename, which orders nothing on the disk: after a power cut the record could be empty.
        with (folder / RECORD_FILE).open("rb") as stream:
            os.fsync(stream.fileno())


def sign_off(folder: Path, lock: str, places: Mapping[str, str]) -> None:
    """Say in a filled folder who built the wheel, and take the machine's places and URLs' passwords out of its log.

    Args:
        lock: digest of the lock that it was built for.
        places: folders of this machine, and what stands for each in the log.
    """
    record = read_record(folder)
    parts = record.parts
    made = Provenance(
        envbuild=__version__,
        built=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lock=lock,
        toolchain={name: text for name, text in parts.flat().items() if name.partition(".")[0] in OF_THE_MACHINE},
    )
    write_atomic(folder / PROVENANCE_FILE, made.model_dump_json(by_alias=True, indent=1) + "\n")
    log = folder / LOG_FILE
    if log.is_file():
        with machine_errors(log):
            text = mask(log.read_text(errors="replace"))
            # Longest first: the store mostly lies in the home folder. A place ends where a longer name does not go on:
            # /home/me is no part of /home/me2.
            for place, name in sorted(places.items(), key=lambda pair: len(pair[0]), reverse=True):
                text = re.sub(re.escape(place) + r"(?![\w.-])", name, text)
            log.write_text(text)


def read_record(folder: Path) -> WheelRecord:
    """The record in a folder.

    Raises:
        CheckRefusedError: it is missing, damaged, or its parts have another key than it states.
    """
    try:
        # Entries also come from shared stores: a pipe in the record's place would block, an endless file fill memory.
        record = WheelRecord.model_validate_json(read_plain(folder / RECORD_FILE, MOST_RECORD_BYTES))
    except FileNotFoundError as error:
        raise bad_entry(folder, f"{RECORD_FILE} is missing") from error
    except OSError as error:
        raise bad_entry(folder, f"{RECORD_FILE} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise bad_entry(folder, f"{RECORD_FILE} cannot be read: {describe_errors(error)}") from error
    if record.parts.key != record.key:
        raise bad_entry(folder, "its parts have another key than the one it is kept under")
    return record


def read_kept(folder: Path) -> WheelRecord:
    """The record of an entry of a wheelhouse.

    Raises:
        CheckRefusedError: it is missing, damaged, or another key's than that of the folder.
    """
    record = read_record(folder)
    if record.key.removeprefix("sha256:") != folder.name:
        raise bad_entry(folder, f"it is the entry of another key, {short(record.key)}")
    return record


def check_entry(folder: Path, key: str) -> WheelRecord:
    """The record of an entry that came from elsewhere, after everything that it says of itself was looked at.

    Raises:
        CheckRefusedError: it is not the entry of ``key``, or not what its record says.
    """
    record = read_record(folder)
    if problem := "it has another key" if record.key != key else _problem(folder, record):
        raise bad_entry(folder, problem)
    return record


def _problem(folder: Path, record: WheelRecord) -> str:
    parts = record.parts
    try:
        name, version, _, _ = parse_wheel_filename(record.file)
        same = canonicalize_name(name) == parts.package and version == Version(parts.version)
    except (InvalidWheelFilename, InvalidVersion):
        same = False
    if not same:
        return f"{record.file!r} is not a wheel of {parts.package} {parts.version}"
    # Any other file would be kept and pushed on without a check.
    allowed = {record.file, RECORD_FILE, LOG_FILE, PROVENANCE_FILE, ENTRY_INDEX_FILE}
    if others := sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*")} - allowed):
        return f"it has files that do not belong to a wheel: {', '.join(others)}"
    wheel = folder / record.file
    if not wheel.is_file() or wheel.stat().st_size != record.size_bytes or sha256_file(wheel) != record.digest:
        return f"{record.file} is not the wheel that its record is about"
    # pyelftools: imported only where an entry comes from elsewhere.
    from envbuild.wheels.audit.elf import read_wheel

    actual = sum((binary.architectures for binary in read_wheel(wheel)), Architectures())
    content = (set(actual.sass), set(actual.ptx))
    if content != (set(record.sm), set(record.ptx)):
        return f"it contains {actual.text()}, which differs from its record"
    # A package without CUDA sources has no GPU code, whatever SMs its key is for.
    if actual != Architectures() and content != (set(parts.sm), set(parts.ptx)):
        # Its words are from elsewhere, so they are not sorted: they may be no SMs.
        wanted = Architectures(sass=parts.sm, ptx=parts.ptx)
        return f"it contains {actual.text()}, and its key is for {wanted.text()}"
    return ""


def bad_entry(path: Path, why: str) -> CheckRefusedError:
    """The error for an entry that cannot be used."""
    return CheckRefusedError(
        f"the wheelhouse's entry {short(path.name)} cannot be used",
        why=f"{why} ({path})",
        fix="`envbuild wheels` for its stack and target builds it again; `envbuild wheels prune` removes it.",
    )


def index_path_of(parts: KeyParts) -> tuple[str, str]:
    """Where a remote store has wheels that may stand in for one another: by sdist, then by all but the compilers."""
    fit = digest_of(parts.without_machine())
    return source_index(parts.sdist or parts.commit), fit.removeprefix("sha256:")[:INDEX_DIGITS]


def source_index(source: str) -> str:
    """The outer part of the index path: all wheels of an sdist (its digest), or of a commit."""
    return source.removeprefix("sha256:")[:INDEX_DIGITS]
