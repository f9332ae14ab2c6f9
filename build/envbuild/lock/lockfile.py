"""What a lock directory holds: the record ``stack.lock.toml`` and one requirements file a phase."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from envbuild import __version__
from envbuild.catalog import toml
from envbuild.catalog.stack import Phase
from envbuild.core.digests import digest_of, sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.core.text import quoted_command
from envbuild.lock.models import SCHEMA, Lock, LockedComponent, LockedPhase, LockedTorch
from envbuild.lock.requirement_lines import read_pins
from envbuild.lock.uv_lock import parse_uv_lock

RECORD_FILE = "stack.lock.toml"
PROJECT_FILE = "pyproject.toml"
# Next to the other files for use; it names the index of whoever locked, so it is not committed.
UV_LOCK = "uv.lock"
# The folder of a lock with the wheels of its project's own packages.
WHEELS = "wheels"
# The folder of a project with its locks: lockfiles/NAME/BASE.
LOCKFILES = "lockfiles"
# In the order of installation: what is built needs what was installed before.
PHASE_FILES: dict[str, str] = {"main": "main.txt", "compile": "compile.txt", "git": "git.txt"}
# What the isolated builds of phase git take (PEP 508 lines, for `uv pip install --build-constraints`), if it has any.
BUILDS_FILE = "git-build.txt"


@dataclass(frozen=True)
class LockDirectory:
    """A lock directory that was read and whose files have the digests that its record states."""

    path: Path
    lock: Lock

    def file(self, phase: str) -> Path | None:
        """The requirements file of a phase; None when the phase has no packages."""
        locked = self.lock.phases.get(phase)
        return self.path / locked.file if locked and locked.packages else None

    @property
    def builds(self) -> Path | None:
        """What isolated builds of phase git are held to; None where the lock says nothing of it."""
        git = self.lock.phases.get("git")
        return self.path / BUILDS_FILE if git and git.builds else None

    @property
    def shared_builds(self) -> list[str]:
        """The packages from git that are built without isolation, with what is installed."""
        components = self.lock.components.items()
        return sorted(name for name, component in components if component.commit and component.phase is Phase.COMPILE)

    @property
    def addresses(self) -> dict[str, str]:
        """Where the named indexes of its uv project are, by name: in the uv.lock next to it, which is not committed.

        A stack's indexes are where the site's configuration says, and nowhere else.
        """
        path, indexes = self.path / UV_LOCK, self.lock.indexes
        if self.lock.project is None or not indexes or not path.is_file():
            return {}
        with machine_errors(path, "read"), contextlib.suppress(ValueError):
            sources = {package.name: package.source for package in parse_uv_lock(path.read_text()).packages}
            by_name = {name: sources.get(packages[0], {}).get("registry", "") for name, packages in indexes.items()}
            return {name: address for name, address in by_name.items() if "://" in address}
        return {}

    @property
    def own_wheels(self) -> dict[str, Path]:
        """The wheels in it, by package."""
        return {
            canonicalize_name(parse_wheel_filename(name)[0]): self.path.absolute() / WHEELS / name
            for name in self.lock.wheels
        }

    @property
    def files(self) -> list[str]:
        """Its files, by their paths in it."""
        more = [*([BUILDS_FILE] if self.builds else []), *(f"{WHEELS}/{name}" for name in self.lock.wheels)]
        return [RECORD_FILE, PROJECT_FILE, *PHASE_FILES.values(), *more]

    def packages(self) -> dict[str, str]:
        """Every locked package and its version, by name, over all phases."""
        by_name: dict[str, str] = {
            canonicalize_name(name): component.version
            for name, component in self.lock.components.items()
            if component.commit or component.url
        }
        for phase in self.lock.phases:
            if file := self.file(phase):
                by_name.update(read_pins(file.read_text()))
        return dict(sorted(by_name.items()))


def git_build_options(builds: str, shared: Sequence[str]) -> list[str]:
    """The options of ``uv pip install`` that say how the packages of phase git are built.

    Args:
        builds: the path of git-build.txt; empty: the lock has none, so what builds its packages is in phase main, or
            they need nothing.
        shared: the packages that are built without isolation.
    """
    if not builds:
        return ["--no-build-isolation"]
    return [
        "--build-constraints",
        builds,
        *(word for name in shared for word in ("--no-build-isolation-package", name)),
    ]


def snapshot(lock: LockDirectory, folder: Path) -> LockDirectory:
    """A private copy of a lock, so that it does not change while it is being installed.

    Raises:
        CheckRefusedError: it was changed since it was read.
    """
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in lock.files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((lock.path / name).read_bytes())
    # Installing takes minutes, in which another envbuild may publish a lock at that path.
    copy = read_lock(folder)
    if copy.lock != lock.lock:
        raise CheckRefusedError(
            f"the lock in {lock.path} was replaced while it was in use",
            why=f"It was {lock.lock.digest} when this command started, and is {copy.lock.digest} now.",
            fix="Run the command again: it takes the lock as it is now.",
        )
    return copy


def content_digest(
    base_digest: str,
    torch: LockedTorch,
    components: dict[str, LockedComponent],
    phases: dict[str, LockedPhase],
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    """The digest that names a lock: what it installs where, without dates and without ``found_in``."""
    return digest_of(
        {
            # A lock without variables or files has the digest that it had before there were any.
            **({"environment": dict(environment)} if environment else {}),
            **({"files": dict(files)} if files else {}),
            "schema": SCHEMA,
            "base": base_digest,
            # Not found_in: the lock is the same wherever a site has that build.
            "torch": [torch.version, torch.build],
            "components": {
                name: [component.version, component.phase.value, component.commit, list(component.modules)]
                for name, component in components.items()
            },
            "phases": {
                name: [phase.digest, phase.builds] if phase.builds else phase.digest for name, phase in phases.items()
            },
        }
    )


def sealed(lock: Lock) -> Lock:
    """The record with its seal."""
    return lock.model_copy(update={"seal": _seal(lock)})


def _seal(lock: Lock) -> str:
    # Without defaults: a field that a later version adds leaves the seals of older records valid.
    return digest_of(lock.model_dump(mode="json", by_alias=True, exclude={"seal"}, exclude_defaults=True))


def render(lock: Lock) -> str:
    """The text of ``stack.lock.toml``."""
    import tomlkit  # slow, and most commands only read

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
        ConfigurationError: there is no lock.
        CheckRefusedError: a file or the record was changed or damaged, or a newer envbuild wrote it.
    """
    record = path / RECORD_FILE
    if not record.is_file():
        raise ConfigurationError(
            f"there is no lock in {path}",
            why=f"{record} does not exist.",
            fix=f"Make it first: {_command_for(path)}",
        )
    lock = _read_record(record)
    problems = [*_changed_files(path, lock), *_changed_record(lock)]
    if problems:
        raise CheckRefusedError(
            f"the lock in {path} was changed after it was made", why="\n".join(problems), fix=_restore(path)
        )
    return LockDirectory(path, lock)


def _command_for(path: Path) -> str:
    """The command line that makes a lock there, as far as the place says."""
    if path.absolute().parent.parent.name == LOCKFILES:
        return quoted_command("envbuild", "lock", "--stack", path.absolute().parent.name, "--base", path.name)
    return quoted_command("envbuild", "lock", "--stack", "STACK", "--base", "BASE", "--out", path)


def _restore(path: Path) -> str:
    return (
        f"Restore {path} from version control, or make it anew, with the options it was made with: "
        f"{_command_for(path)} --upgrade"
    )


def _read_record(record: Path) -> Lock:
    with machine_errors(record, "read"):
        raw = record.read_bytes()
    try:
        text = raw.decode()
        _refuse_newer(text, record)
        return toml.parse(text, Lock, str(record))
    except (UnicodeDecodeError, ConfigurationError) as error:
        why = f"{error.what}\n{error.why}" if isinstance(error, ConfigurationError) else str(error)
        raise CheckRefusedError(
            f"the record of the lock in {record.parent} is damaged", why=why, fix=_restore(record.parent)
        ) from error


def _refuse_newer(text: str, record: Path) -> None:
    """Refuse a record in a newer format, which its first line of content states."""
    # By pattern and before the model, which would refuse a newer record for its first unknown key and not say why.
    stated = re.search(r'^schema = "envbuild\.lock/(\d+)"$', text, re.MULTILINE)
    if stated and int(stated[1]) > int(SCHEMA.rpartition("/")[2]):
        raise CheckRefusedError(
            f"the lock in {record.parent} was written by a newer envbuild",
            why=f"Its record has the format envbuild.lock/{stated[1]}; envbuild {__version__} reads {SCHEMA}.",
            fix="Update envbuild, or restore the lock that this one wrote from version control.",
        )


def _changed_files(path: Path, lock: Lock) -> list[str]:
    problems = []
    stated = {PROJECT_FILE: lock.pyproject_digest}
    for name, digest in lock.wheels.items():
        if Path(name).name != name:
            problems.append(f"{name!r} is no name of a wheel")
        else:
            stated[f"{WHEELS}/{name}"] = digest
    for name, phase in lock.phases.items():
        # A record may come from elsewhere: no path that it names is opened, only the files of a lock.
        if phase.file != PHASE_FILES.get(name):
            problems.append(f"phase {name} names the file {phase.file!r}; allowed: {PHASE_FILES.get(name)!r}")
        else:
            stated[phase.file] = phase.digest
            if phase.builds:
                stated[BUILDS_FILE] = phase.builds
    for name, digest in stated.items():
        if not (path / name).is_file():
            problems.append(f"{name} is missing")
        elif (actual := sha256_file(path / name)) != digest:
            problems.append(f"{name}: the record states {digest}, the file has {actual}")
    return problems


def _changed_record(lock: Lock) -> list[str]:
    base = lock.base.definition_digest
    expected = content_digest(base, lock.torch, lock.components, lock.phases, lock.environment, lock.files)
    if lock.digest != expected:
        return [f"{RECORD_FILE}: its digest is {lock.digest}, its content has {expected}"]
    if lock.seal != _seal(lock):
        return [f"{RECORD_FILE}: its seal is {lock.seal}, its content has {_seal(lock)}"]
    return []
