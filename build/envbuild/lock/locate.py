"""Where locks are, and the one that a command takes: the project's own, or the one that comes with envbuild."""

from __future__ import annotations

from pathlib import Path

from envbuild.catalog.catalog import SINGULAR, Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.lock import lockfile
from envbuild.lock.inputs.names import checked_name
from envbuild.lock.inputs.request import is_older
from envbuild.lock.lockfile import LockDirectory, read_lock


def lock_path(project_dir: Path, name: str, base: str) -> Path:
    """Where a lock is written: ``name`` is the stack's, or that of a variant of it."""
    return project_dir / lockfile.LOCKFILES / name / base


def shipped_lock(name: str, base: str) -> Path | None:
    """The lock directory that comes with envbuild; None when none does."""
    path = lock_path(data_root(), name, base)
    return path if (path / lockfile.RECORD_FILE).is_file() else None


def find_lock(project_dir: Path, selection: Selection, name: str | None = None) -> LockDirectory:
    """The lock of a stack on a base: the project's own, else the one that comes with envbuild.

    The project's own is taken even where it is older than its stack (see :func:`is_older`); the other one only where
    it was made from the definitions that are in force in the project.

    Args:
        name: of a lock that is not the stack's own (``envbuild lock --name``).

    Raises:
        ConfigurationError: there is none, or only one that was made from other definitions; says how to make it.
        UsageError: the lock of that name is of another stack, or the name is none.
    """
    stack, base = selection.stack_name, selection.base_name
    kept = stack if name is None else checked_name(name)
    path = lock_path(project_dir, kept, base)
    if (path / lockfile.RECORD_FILE).is_file():
        return _of_stack(read_lock(path), selection)
    if shipped := shipped_lock(kept, base):
        lock = _of_stack(read_lock(shipped), selection)
        _refuse_foreign(lock, selection, path)
        return lock
    named = "" if kept == stack else f" named {kept}"
    elsewhere = [file.parent.name for file in sorted(path.parent.glob(f"*/{lockfile.RECORD_FILE}"))]
    raise ConfigurationError(
        f"there is no lock of stack {stack} on base {base}{named}",
        why=f"{path} does not exist" + (f"; {path.parent} has it on {', '.join(elsewhere)}." if elsewhere else "."),
        fix=f"Make it first: envbuild lock --stack {stack} --base {base}"
        + (f" --name {kept} (and its pins)" if named else ""),
    )


def _of_stack(directory: LockDirectory, selection: Selection) -> LockDirectory:
    """The lock, if it is of the selected stack: bases, targets and cases are chosen by the stack."""
    stack, name = directory.lock.stack, directory.path.parent.name
    if stack == selection.stack_name:
        return directory
    raise UsageError(
        f"the lock named {name} on base {directory.path.name} is not of stack {selection.stack_name}",
        why=f"{directory.path} was made from stack {stack}.",
        fix=f"Name its stack: --stack {stack}" + ("" if name == stack else f" --name {name}"),
    )


def _refuse_foreign(directory: LockDirectory, selection: Selection, own: Path) -> None:
    """Refuse a lock that comes with envbuild where the project defines something that decides it in another way."""
    lock, catalog = directory.lock, selection.catalog
    made_for = Selection(catalog, lock.stack, lock.base.name, selection.target_name)
    if not is_older(lock, made_for):
        return
    definitions = (
        ("stacks", lock.stack, made_for.stack, lock.inputs.stack_digest),
        ("bases", lock.base.name, made_for.base, lock.inputs.base_digest),
    )
    others = [
        f"{SINGULAR[kind]} {name} in {catalog.path(kind, name)}"
        for kind, name, now, was in definitions
        if definition_digest(now) != was
    ]
    named = "" if own.parent.name == lock.stack else f" --name {own.parent.name} (and its pins)"
    raise ConfigurationError(
        f"the lock of {own.parent.name} on {own.name} that comes with envbuild is not for the definitions here",
        why=f"{directory.path} was made from another definition than: "
        f"{', '.join(others) or f'the conflicts and companions in {catalog.folders[0]}'}.\n"
        f"This project has no lock of its own: {own} does not exist.",
        fix=f"Make it: envbuild lock --stack {lock.stack} --base {lock.base.name}{named}",
    )
