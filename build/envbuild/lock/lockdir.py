"""Lock directories: where they are, which one a command takes, what may be replaced, and how one appears as a whole."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from pathlib import Path

from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.catalog.models import SINGULAR
from envbuild.core.errors import CheckRefusedError, ConfigurationError, UsageError
from envbuild.core.files import machine_errors, remove_tree, replace_tree
from envbuild.core.progress import Reporter
from envbuild.core.text import quoted_command
from envbuild.lock import lockfile
from envbuild.lock.inputs.pins import checked_name
from envbuild.lock.inputs.request import LockRequest, is_older, request_of, request_options
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory, read_lock
from envbuild.lock.models import Lock


def lock_path(project_dir: Path, name: str, base: str) -> Path:
    """Where a lock is written: ``name`` is the stack's, or that of a variant of it."""
    return project_dir / lockfile.LOCKFILES / name / base


def shipped_lock(name: str, base: str) -> Path | None:
    """The lock directory that comes with envbuild; None when none does."""
    path = lock_path(data_root(), name, base)
    return path if (path / lockfile.RECORD_FILE).is_file() else None


def lock_on_base(path: Path, base: str) -> Lock | None:
    """The lock in a directory, if it can be read and is on this base."""
    if not (path / lockfile.RECORD_FILE).is_file():
        return None
    with contextlib.suppress(CheckRefusedError):
        lock = read_lock(path).lock
        return lock if lock.base.name == base else None
    return None


def with_locked_base(
    selection: Selection, name: str | Path, project_dir: Path, reporter: Reporter, *, target: str | None
) -> Selection:
    """The selection on the base that the lock is on, where its own, the stack's default, has none: the newest.

    Args:
        name: of the lock, or its directory.
        target: the one that the user named; None: the locks of all targets count.
    """
    stack, default = selection.stack, selection.base_name

    def locked(base: str) -> Lock | None:
        path = name if isinstance(name, Path) else lock_path(project_dir, name, base)
        return lock_on_base(path, base)

    if isinstance(name, Path):
        there = locked(default) is not None
    else:
        # Also a damaged one, which is refused later.
        own = lock_path(project_dir, name, default) / lockfile.RECORD_FILE
        there = own.is_file() or shipped_lock(name, default) is not None
    if there:
        return selection
    # From the last entry on: of several targets with one base the first stays.
    targets = {
        base: entry.target for entry in reversed(stack.builds) for base in entry.bases if target in (None, entry.target)
    }
    moments = {base: lock.inputs.as_of for base in targets if (lock := locked(base)) is not None}
    if not moments:
        return selection
    base = max(moments, key=lambda name: moments[name])
    others = [name for name in moments if name != base]
    which = f"the newest; others are on {', '.join(others)}" if others else "the only one"
    reporter.note(f"note: no lock on the default base {default}: taking the one on {base} ({which})")
    return Selection(selection.catalog, selection.stack_name, base, targets[base])


def find_lock(project_dir: Path, selection: Selection, name: str | None = None) -> LockDirectory:
    """The lock of a stack on a base: the project's own, else the one that comes with envbuild.

    The project's own is taken even where it is older than its stack (see :func:`is_older`); the other one only where
    it was made from the definitions that are in force in the project.

    Args:
        name: of a lock that is not the stack's own (``envbuild lock --name``).

    Raises:
        ConfigurationError: there is none, or only one that was made from other definitions; says how to make it.
        UsageError: the lock of that name is of another stack, or the name is not valid.
    """
    base = selection.base_name
    kept = selection.stack_name if name is None else checked_name(name)
    path = lock_path(project_dir, kept, base)
    if (path / lockfile.RECORD_FILE).is_file():
        return _of_stack(read_lock(path), selection)
    if shipped := shipped_lock(kept, base):
        lock = _of_stack(read_lock(shipped), selection)
        _refuse_foreign(lock, selection, path)
        return lock
    raise no_lock(path, selection)


def no_lock(path: Path, selection: Selection) -> ConfigurationError:
    """The error for a lock that is not there, in the folder ``NAME/BASE``, with the command that makes it."""
    stack, base, kept = selection.stack_name, selection.base_name, path.parent.name
    named = "" if kept == stack else f" named {kept}"
    elsewhere = [file.parent.name for file in sorted(path.parent.glob(f"*/{lockfile.RECORD_FILE}"))]
    return ConfigurationError(
        f"there is no lock of stack {stack} on base {base}{named}",
        why=f"{path} does not exist" + (f"; {path.parent} has it on {', '.join(elsewhere)}." if elsewhere else "."),
        fix=f"Make it first: {_make(stack, base, kept if named else '')}",
    )


def _make(stack: str, base: str, name: str) -> str:
    """The command that makes a lock; with a name of its own where it has one."""
    line = quoted_command("envbuild", "lock", "--stack", stack, "--base", base, *(("--name", name) if name else ()))
    return f"{line} (and its pins)" if name else line


def _of_stack(directory: LockDirectory, selection: Selection) -> LockDirectory:
    """The lock, if it is of the selected stack: bases, targets and cases are chosen by the stack."""
    stack, name = directory.lock.stack, directory.path.parent.name
    if stack == selection.stack_name:
        return directory
    raise UsageError(
        f"the lock named {name} on base {directory.path.name} is not of stack {selection.stack_name}",
        why=f"{directory.path} was made from stack {stack}.",
        fix=f"Name its stack: {quoted_command('--stack', stack, *(() if name == stack else ('--name', name)))}",
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
    named = "" if own.parent.name == lock.stack else own.parent.name
    raise ConfigurationError(
        f"the lock of {own.parent.name} on {own.name} that comes with envbuild is not for the definitions here",
        why=f"{directory.path} was made from another definition than: "
        f"{', '.join(others) or f'the conflicts and companions in {catalog.folders[0]}'}.\n"
        f"This project has no lock of its own: {own} does not exist.",
        fix=f"Make it: {_make(lock.stack, lock.base.name, named)}",
    )


def lock_command(directory: LockDirectory) -> str:
    """The command line that makes the lock again at its path, with the options that it was made with."""
    lock, path = directory.lock, directory.path.absolute()
    options = ["envbuild", "lock", "--stack", lock.stack, "--base", lock.base.name]
    if path.parent.parent.name != lockfile.LOCKFILES:
        options += ["--out", str(path)]
    elif path.parent.name != lock.stack:
        options += ["--name", path.parent.name]
    return shlex.join([*options, *request_options(request_of(lock))])


def refuse_what_is_no_lock(path: Path) -> None:
    """A lock directory is replaced as a whole: whatever else is in the folder would be lost.

    Raises:
        UsageError: the folder holds something else than a lock's files.
    """
    own = {lockfile.RECORD_FILE, lockfile.PROJECT_FILE, lockfile.UV_LOCK, lockfile.BUILDS_FILE, lockfile.WHEELS}
    own |= {*PHASE_FILES.values()}
    with machine_errors(path):
        others = sorted({file.name for file in path.iterdir()} - own) if path.is_dir() else []
    if others:
        raise UsageError(
            f"{path} is not a folder of a lock",
            why=f"It would be replaced as a whole, and holds {', '.join(others[:5])}{', ...' if others[5:] else ''}.",
            fix="Name another folder, or move these files.",
        )


def refuse_to_replace(path: Path, selection: Selection, request: LockRequest) -> None:
    """Refuse options that would replace the existing lock by one that is made in another way."""
    options = _own_options(selection, request)
    try:
        existing = read_lock(path).lock if options and (path / lockfile.RECORD_FILE).is_file() else None
    except CheckRefusedError:
        return  # damaged, or of a newer envbuild: lock_stack refuses it next
    if existing is None or _own_options(selection, request_of(existing)) == options:
        return
    before = " ".join(_own_options(selection, request_of(existing)))
    raise UsageError(
        f"{' '.join(options)} would make another lock of {path.parent.name} on {path.name} than the existing one",
        why=f"{path} was made {f'with {before}' if before else 'without'}, and options alone do not replace it.",
        fix=f"Keep both: --name NAME (the lock goes to lockfiles/NAME/{path.name}) or --out DIR. To replace it: "
        f"--name {path.parent.name}.",
    )


def _own_options(selection: Selection, request: LockRequest) -> list[str]:
    """The options of a request that differ from the stack's file and the base."""
    # Without pins: these give the lock another name or place (variant_name).
    options = ["--as-of", request.as_of] if request.as_of and request.as_of != selection.stack.as_of else []
    options += ["--no-as-of"] if request.no_as_of else []
    if request.torch_build and request.torch_build != selection.base.torch.build:
        options += ["--torch-build", request.torch_build]
    return [*options, *(word for code in sorted(set(request.allow)) for word in ("--allow", code))]


def tidy(path: Path) -> None:
    """Remove what a killed process left next to the lock; the old lock returns if there is no new one."""
    with machine_errors(path):
        for leftover in [*path.parent.glob(f".{path.name}.old.*"), *path.parent.glob(f".{path.name}.new.*")]:
            old = leftover / path.name
            # replace_tree renames the old directory away first: killed before the second rename, this copy is the only
            # lock.
            if old.is_dir() and not path.exists():
                old.rename(path)
            remove_tree(leftover)


def copy_files(lock: Path, into: Path) -> None:
    """Copy the files of a lock that was just made into a folder."""
    for name in (*read_lock(lock).files, lockfile.UV_LOCK):
        (into / name).parent.mkdir(exist_ok=True)
        (into / name).write_bytes((lock / name).read_bytes())


def publish(work: Path, path: Path) -> None:
    """Copy the finished files next to the lock and swap the directories."""
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Next to the lock, not in the store: rename(2) does not cross file systems (EXDEV).
        staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    try:
        with machine_errors(path):
            # mkdtemp makes a folder that its owner alone may enter (0700).
            staged.chmod(0o755)
            copy_files(work, staged)
        replace_tree(staged, path)
    finally:
        remove_tree(staged)
