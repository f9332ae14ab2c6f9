"""Installs a lock into an environment on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.errors import UsageError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import Finished, run
from envbuild.core.progress import Reporter
from envbuild.lock.record import PHASE_FILES, LockDirectory
from envbuild.lock.uv import git_environment, uv_program
from envbuild.sync.imports import check_imports
from envbuild.sync.install import PhaseRun, install, locked_torch
from envbuild.sync.place import Place
from envbuild.sync.provided import refuse_without_base


@dataclass(frozen=True, kw_only=True)
class Synced:
    """A filled environment: what was installed, and which modules imported.

    Attributes:
        not_checked: modules of phases that were not installed.
    """

    phases: tuple[PhaseRun, ...]
    imported: tuple[str, ...]
    not_checked: tuple[str, ...]


@dataclass(frozen=True)
class _Here:
    environment: dict[str, str]
    reporter: Reporter

    def __call__(self, argv: Sequence[str], *, what: str, log: Path) -> Finished:
        return run(argv, what=what, log=log, env=self.environment, on_line=self.reporter.update, check=False)


def sync(
    lock: LockDirectory, into: Path, *, phases: Sequence[str], site: Site, logs: Path, reporter: Reporter
) -> Synced:
    """Make the environment ``into`` anew, install ``phases`` of the lock, and import every module they bring.

    Raises:
        UsageError: ``phases`` names none of the lock's, or leaves out ``main``; or ``into`` is no environment and not
            empty.
        BuildError: a package does not install.
        CheckRefusedError: a module does not import.
        MachineError: the lock's base brings packages, which are not on this machine.
    """
    if "main" not in phases or any(phase not in PHASE_FILES for phase in phases):
        raise UsageError(
            f"phases {', '.join(phases) or 'none'} cannot be installed",
            why=f"The phases are {', '.join(PHASE_FILES)}, and the others build on main.",
            fix="Name main, or main and others: --phases main,compile",
        )
    record = lock.lock
    refuse_without_base(record)
    source = locked_torch(site, record)
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment |= git_environment()
    into = into.absolute()
    _make_room(into)
    place = Place(
        uv=str(uv_program()),
        lock=str(lock.path.absolute()),
        python=record.base.python,
        venv=str(into),
        run=_Here(environment, reporter),
        disk=into,
        logs=logs,
    )
    done = install(lock, place, source.uv_args(), reporter, phases=phases)
    checked = {
        name: item.modules
        for name, item in record.components.items()
        if item.modules and ("git" if item.commit else item.phase.value) in phases
    }
    plain = {key: value for key, value in environment.items() if not key.startswith("PYTHON")}
    check_imports(checked, place.venv_python, _Here(plain, reporter), logs, reporter)
    imported = tuple(module for modules in checked.values() for module in modules)
    every = [module for item in record.components.values() for module in item.modules]
    return Synced(
        phases=done, imported=imported, not_checked=tuple(module for module in every if module not in imported)
    )


def _make_room(into: Path) -> None:
    """Remove the environment that is there; anything else stays and is refused."""
    with machine_errors(into):
        if (into / "pyvenv.cfg").is_file():
            remove_tree(into)
        elif into.exists() and not (into.is_dir() and not any(into.iterdir())):
            raise UsageError(
                f"{into} is there and is no environment",
                why="An environment is made anew, and what is in its place would be lost.",
                fix="Name another folder, or remove this one yourself.",
            )
