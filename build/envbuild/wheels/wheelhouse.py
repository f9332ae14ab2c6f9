"""The wheelhouse: wheels by build key, each with the parts of its key, what it contains, and its build log."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import Field, ValidationError

from envbuild.catalog.models import Model
from envbuild.core.digests import Json, sha256_file, short
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.store import seals
from envbuild.store.local import LocalStore
from envbuild.wheels.key import Parts

KIND = "wheels"
RECORD_FILE = "wheel.json"
LOG_FILE = "build.log"


class WheelRecord(Model):
    """``wheel.json``: where a wheel comes from and what it was found to contain."""

    schema_: Literal["envbuild.wheel/1"] = Field(alias="schema", default="envbuild.wheel/1")
    key: str = Field(description="sha256 over the parts")
    parts: Parts
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


@dataclass(frozen=True, kw_only=True)
class Built:
    """A wheel in the wheelhouse, and whether this call built it."""

    path: Path
    record: WheelRecord
    built: bool = False

    @property
    def wheel(self) -> Path:
        """The wheel itself."""
        return self.path / self.record.file


# For those who take wheels and have none.
NO_BUILT: Mapping[str, Built] = MappingProxyType({})


def digests_of(wheels: Mapping[str, Built]) -> dict[str, Json]:
    """The digest of each wheel, by package."""
    return {name: item.record.digest for name, item in sorted(wheels.items())}


class Wheelhouse:
    """The wheels of a store. Entries are complete or absent, never changed, and named by their key."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def find(self, key: str) -> Built | None:
        """The wheel of a key, verified; None when it is not there, or was damaged."""
        path = self._store.find(KIND, key)
        return None if path is None else self._read(path)

    def get_or_build(self, key: str, build: Callable[[Path], None]) -> Built:
        """The wheel of a key; when absent ``build`` fills a folder with wheel, record and log."""
        entry = self._store.get_or_build(KIND, key, build)
        found = self._read(entry.path)
        return Built(path=found.path, record=found.record, built=entry.built)

    def all(self) -> Iterator[Built]:
        """Every wheel whose record can be read, by package, version and key."""
        found = []
        for path in self._entries():
            with contextlib.suppress(CheckRefusedError):
                found.append(self._read(path))
        yield from sorted(found, key=_order)

    def problems(self) -> dict[str, str]:
        """What is wrong with entries, all of each read again, by the entry's name; empty when nothing is."""
        found = {}
        for path in self._entries():
            try:
                problem = self.problem(self._read(path))
            except CheckRefusedError as error:
                problem = error.why
            if problem:
                found[path.name] = problem
        return found

    def _entries(self) -> list[Path]:
        folder = self._store.root / KIND
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def by_prefix(self, text: str) -> Built:
        """The wheel whose key begins with ``text`` (hex digits, with or without ``sha256:``).

        Raises:
            ConfigurationError: none does, or several do.
        """
        wanted = text.removeprefix("sha256:")
        found = [item for item in self.all() if item.record.key.removeprefix("sha256:").startswith(wanted)]
        if len(found) != 1:
            names = ", ".join(f"{short(item.record.key)} ({item.record.file})" for item in (found or self.all()))
            raise ConfigurationError(
                f"{'several wheels have' if found else 'no wheel has'} a key that begins with {wanted!r}",
                why=f"{'They are' if found else 'There are'}: {names or 'no wheels'}.",
                fix="Give more of the key; `envbuild wheels list` has them all.",
            )
        return found[0]

    def problem(self, item: Built) -> str:
        """What is wrong with an entry, all of it read again; empty when nothing is."""
        try:
            if sha256_file(item.wheel) != item.record.digest:
                return f"{item.record.file} is not the wheel that was kept"
        except FileNotFoundError:
            return f"{item.record.file} is missing"
        return seals.broken(item.path)

    def _read(self, path: Path) -> Built:
        try:
            record = WheelRecord.model_validate_json((path / RECORD_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise _bad(path, str(error)) from error
        item = Built(path=path, record=record)
        if record.parts.key != record.key or record.key.removeprefix("sha256:") != path.name:
            raise _bad(path, "its parts have another key than the one it is kept under")
        return item


def _order(item: Built) -> tuple[str, str, str]:
    return item.record.parts.package, item.record.parts.version, item.record.key


def fill(folder: Path, wheel: Path, record: WheelRecord, log: Path) -> None:
    """Put a checked wheel with its record and log into the folder that becomes an entry."""
    with machine_errors(folder):
        shutil.copy2(wheel, folder / record.file)
        if log.is_file():
            shutil.copy2(log, folder / LOG_FILE)
        (folder / RECORD_FILE).write_text(record.model_dump_json(by_alias=True, indent=1) + "\n")
        with (folder / RECORD_FILE).open("rb") as stream:
            os.fsync(stream.fileno())


def _bad(path: Path, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the wheelhouse's entry {short(path.name)} cannot be used",
        why=f"{why} ({path})",
        fix=f"Remove the folder {path}; the wheel is then built again.",
    )
