"""What a lock directory holds: the record ``stack.lock.toml`` and one requirements file a phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tomlkit
from pydantic import Field

from envbuild.catalog import toml
from envbuild.catalog.models import Model, Name, Phase
from envbuild.core.digests import digest_of, sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError

RECORD_FILE = "stack.lock.toml"
PHASE_FILES: dict[str, str] = {"main": "main.txt", "compile": "compile.txt", "git": "git.txt"}
SCHEMA: Literal["envbuild.lock/1"] = "envbuild.lock/1"


class LockedComponent(Model):
    """A component as asked and as found."""

    asked: str
    version: str
    phase: Phase
    because: str = Field(default="the stack's file", description="who decided it: the stack, a pin, upstream's file")
    modules: tuple[str, ...] = ()
    sdist: str | None = Field(
        default=None, description="digest of the sdist that a compile-phase component is built from"
    )
    git: str | None = None
    commit: str | None = None
    committed_at: str | None = None
    ref_kind: Literal["branch", "tag", "commit"] | None = None
    follows: bool = Field(default=False, description="locked at a branch's tip: the lock is old once the branch moves")


class LockedPhase(Model):
    """A requirements file of the lock."""

    file: str
    packages: int
    digest: str


class LockedTorch(Model):
    """Which build of torch the lock took, and through which kind of place it was found (never where that is)."""

    version: str
    build: str = Field(description="'cpu', 'cu130', ...; 'index' for the build that the package index has")
    found_in: Literal["find-links", "torch-index", "package-index"]


class LockedBase(Model):
    """The base the lock is for."""

    name: Name
    definition_digest: str
    distribution: str
    release: str
    platform: str
    glibc: str
    python: str
    cuda: str | None = None
    provides: dict[str, str] = Field(default_factory=dict)


class Inputs(Model):
    """What the lock was made from. The same inputs and as-of date give the same lock."""

    digest: str
    stack_digest: str
    base_digest: str
    torch_build: str
    uv: str
    as_of: str = Field(description="nothing uploaded to the index after this moment was taken (UTC)")
    as_of_asked: str = Field(default="now", description="'now', 'release', a date or a commit")
    pins: dict[str, str] = Field(default_factory=dict, description="what the user pinned on the command line")
    as_of_request: str | None = Field(default=None, description="--as-of, when it was given")
    torch_build_request: str | None = Field(default=None, description="--torch-build, when it was given")
    allow: tuple[str, ...] = Field(default=(), description="--allow")
    as_of_reason: str = Field(default="", description="how the moment follows from what was asked")


class Lock(Model):
    """``stack.lock.toml``."""

    schema_: Literal["envbuild.lock/1"] = Field(alias="schema", default=SCHEMA)
    stack: Name
    digest: str = Field(description="of the lock's content: files, components and base; not of dates")
    source_date_epoch: int = Field(description="newest upload time among the locked files, seconds since 1970")
    inputs: Inputs
    base: LockedBase
    torch: LockedTorch
    components: dict[str, LockedComponent]
    phases: dict[str, LockedPhase]
    overrides: dict[str, str] = Field(default_factory=dict, description="versions put over what packages declare")
    allowed: tuple[str, ...] = Field(default=(), description="findings of checks that the user let pass")
    rewritten: tuple[str, ...] = Field(default=(), description="requirements that named another CUDA than the base's")


@dataclass(frozen=True)
class LockDirectory:
    """A lock directory that was read and whose files have the digests that its record states."""

    path: Path
    lock: Lock

    def file(self, phase: str) -> Path | None:
        """The requirements file of a phase; None when the phase has no packages."""
        locked = self.lock.phases.get(phase)
        return self.path / locked.file if locked and locked.packages else None

    def packages(self) -> dict[str, str]:
        """Every locked package and its version, by name, over all phases."""
        found: dict[str, str] = {}
        for phase in self.lock.phases:
            if file := self.file(phase):
                found.update(read_pins(file.read_text()))
        return dict(sorted(found.items()))


def read_pins(requirements: str) -> dict[str, str]:
    """``name -> version`` of the ``name==version`` lines of a requirements file."""
    pins: dict[str, str] = {}
    for line in requirements.splitlines():
        if line[:1].isalnum() and "==" in line:
            name, _, rest = line.partition("==")
            pins[name.split("[")[0].strip()] = rest.split(";")[0].split("\\")[0].strip()
    return pins


def content_digest(
    base_digest: str, torch: LockedTorch, components: dict[str, LockedComponent], phases: dict[str, LockedPhase]
) -> str:
    """The digest that names a lock: what it installs where, without dates and without ``found_in``."""
    return digest_of(
        {
            "schema": SCHEMA,
            "base": base_digest,
            "torch": [torch.version, torch.build],
            "components": {name: [item.version, item.phase.value] for name, item in components.items()},
            "phases": {name: item.digest for name, item in phases.items()},
        }
    )


def render(lock: Lock) -> str:
    """The text of ``stack.lock.toml``."""
    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `envbuild lock`; review it, do not edit it."))
    document.add(tomlkit.nl())
    document["schema"] = SCHEMA
    # Empty and default keys are left out: a review should show what was decided, and nothing else.
    for key, value in lock.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
        document[key] = value
    return tomlkit.dumps(document)


def read_lock(path: Path) -> LockDirectory:
    """Read a lock directory and check its files against the record.

    Raises:
        ConfigurationError: there is no lock, or its record is no valid one.
        CheckRefusedError: a file or the record was changed by hand.
    """
    record = path / RECORD_FILE
    if not record.is_file():
        raise ConfigurationError(
            f"there is no lock in {path}",
            why=f"{record} does not exist.",
            fix=f"Make it first: envbuild lock --stack {path.parent.name} --base {path.name} --target TARGET",
        )
    lock = toml.load(record, Lock)
    problems = []
    for name, phase in lock.phases.items():
        file = path / phase.file
        if phase.file != PHASE_FILES.get(name):
            problems.append(f"phase {name} names the file {phase.file!r}; allowed: {PHASE_FILES.get(name)!r}")
        elif not file.is_file():
            problems.append(f"{phase.file} is missing")
        elif (found := sha256_file(file)) != phase.digest:
            problems.append(f"{phase.file}: the record states {phase.digest}, the file has {found}")
    expected = content_digest(lock.base.definition_digest, lock.torch, lock.components, lock.phases)
    if lock.digest != expected:
        problems.append(f"{RECORD_FILE}: its digest is {lock.digest}, its content has {expected}")
    if problems:
        raise CheckRefusedError(
            f"the lock in {path} was changed after it was made",
            why="\n".join(problems),
            fix="Restore the files from version control, or lock again with --upgrade.",
        )
    return LockDirectory(path, lock)
