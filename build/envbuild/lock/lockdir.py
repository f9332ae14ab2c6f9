"""The folder of a lock: what may be replaced there, and how it appears as a whole."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.core.files import machine_errors, remove_tree, replace_tree
from envbuild.lock import lockfile
from envbuild.lock.inputs.request import LockRequest, request_of
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory, read_lock


def lock_command(directory: LockDirectory) -> str:
    """The command line that makes the lock again at its path, with the options that it was made with."""
    lock, path = directory.lock, directory.path.absolute()
    options = ["envbuild", "lock", "--stack", lock.stack, "--base", lock.base.name]
    if path.parent.parent.name != lockfile.LOCKFILES:
        options += ["--out", str(path)]
    elif path.parent.name != lock.stack:
        options += ["--name", path.parent.name]
    request = request_of(lock)
    options += [word for name, text in request.pins.items() for word in ("--pin", f"{name}={text}")]
    options += ["--as-of", request.as_of] if request.as_of else []
    options += ["--torch-build", request.torch_build] if request.torch_build else []
    return shlex.join([*options, *(word for code in request.allow for word in ("--allow", code))])


def refuse_what_is_no_lock(path: Path) -> None:
    """A lock directory is replaced as a whole: whatever else is in the folder would be lost.

    Raises:
        UsageError: the folder holds something else than a lock's files.
    """
    own = {lockfile.RECORD_FILE, lockfile.PROJECT_FILE, "uv.lock", *PHASE_FILES.values()}
    with machine_errors(path):
        others = sorted({item.name for item in path.iterdir()} - own) if path.is_dir() else []
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
        return  # damaged, or of a newer envbuild: who reads it next says so
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
    options = ["--as-of", request.as_of] if request.as_of and request.as_of != selection.stack.as_of else []
    if request.torch_build and request.torch_build != selection.base.torch.build:
        options += ["--torch-build", request.torch_build]
    return [*options, *(word for code in sorted(set(request.allow)) for word in ("--allow", code))]


def tidy(path: Path) -> None:
    """Remove what a killed process left next to the lock; the old lock returns if there is no new one."""
    with machine_errors(path):
        for leftover in [*path.parent.glob(f".{path.name}.old.*"), *path.parent.glob(f".{path.name}.new.*")]:
            old = leftover / path.name
            if old.is_dir() and not path.exists():
                old.rename(path)
            remove_tree(leftover)


def publish(work: Path, path: Path) -> None:
    """Copy the finished files next to the lock and swap the directories."""
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with machine_errors(path):
        staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    try:
        with machine_errors(path):
            staged.chmod(0o755)
            for name in (lockfile.RECORD_FILE, "pyproject.toml", "uv.lock", *PHASE_FILES.values()):
                (staged / name).write_bytes((work / name).read_bytes())
        replace_tree(staged, path)
    finally:
        remove_tree(staged)
