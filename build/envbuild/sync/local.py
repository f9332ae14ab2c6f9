"""Installs a lock into an environment on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.models import Target
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.record.content import locked_content
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.settings import installing_uv
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.sync.imports import (
    PROBE,
    Absent,
    ImportProbe,
    Imports,
    NotChecked,
    check_environment,
    modules_of,
    try_imports,
)
from envbuild.sync.install import InstallScope, PhaseRun, install
from envbuild.sync.install_target import InstallTarget
from envbuild.sync.machine import refuse_other_machine, refuse_without_base
from envbuild.wheels.audit.prebuilt import PackageCode, check_prebuilt, site_packages_of

NEVER_BUILT = "locked, never built"


@dataclass(frozen=True, kw_only=True)
class Synced:
    """A filled environment: what was installed, and which modules imported.

    Attributes:
        not_checked: modules of which nothing is known: of phases that were not installed, or not importable here.
        environment: variables that must be set where the environment is used; the import check had them.
        gpu_code: the installed packages with GPU code.
    """

    phases: tuple[PhaseRun, ...]
    imported: tuple[str, ...]
    not_checked: tuple[NotChecked, ...]
    environment: Mapping[str, str]
    gpu_code: tuple[PackageCode, ...] = ()


@dataclass(frozen=True)
class LocalCommands:
    """A :class:`envbuild.sync.install_target.RunCommand` on this machine."""

    environment: dict[str, str]
    reporter: Reporter | None

    def __call__(self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
        return run(
            argv,
            what=what,
            log=log,
            on_line=self.reporter.update if self.reporter else None,
            check=False,
            options=ProcessOptions(env=self.environment, timeout_seconds=timeout_seconds, error=CheckRefusedError),
        )


def sync(
    lock: LockDirectory,
    into: Path,
    scope: InstallScope,
    target: Target,
    logs: Path,
    context: Context,
) -> Synced:
    """Make the environment ``into`` anew, install what ``scope`` names of the lock, and import every module it brings.

    Args:
        target: the hardware that the environment is for, which need not be this machine's.

    Raises:
        UsageError: the scope has an unknown phase, or leaves out ``main``; or ``into`` is not an
            environment and not empty.
        BuildError: a package does not install.
        CheckRefusedError: a module does not import, or the installed GPU code does not run on the target.
        MachineError: the lock's base brings packages, which are not on this machine; or this machine has another
            architecture or an older glibc than the base.
    """
    place, done = fill_environment(lock, into, scope, logs, context)
    gpu_code = check_prebuilt(site_packages_of(into), target.sm, context.store, context.reporter)
    found = import_modules(lock, place, scope, target, context.reporter).refuse_failed()
    return Synced(
        phases=done,
        imported=found.imported,
        not_checked=found.not_checked,
        environment=lock.lock.variables(place.venv),
        gpu_code=gpu_code,
    )


def fill_environment(
    lock: LockDirectory, into: Path, scope: InstallScope, logs: Path, context: Context
) -> tuple[InstallTarget, tuple[PhaseRun, ...]]:
    """Make the environment ``into`` anew and install what ``scope`` names of the lock; see :func:`sync`."""
    phases, reporter = scope.phases, context.reporter
    if "main" not in phases or any(phase not in PHASE_FILES for phase in phases):
        raise UsageError(
            f"phases {', '.join(phases) or 'none'} cannot be installed",
            why=f"The phases are {', '.join(PHASE_FILES)}, and the others build on main.",
            fix="Name main, or main and others: --phases main,compile",
        )
    record = lock.lock
    refuse_without_base(record)
    base = record.base
    refuse_other_machine(
        base.platform,
        base.glibc,
        what=f"the lock of stack {record.stack} on base {base.name} cannot be installed on this machine",
        fix="Install it on a machine like the base, build the image (`envbuild image`), which has the base itself, or "
        "lock the stack on a base like this machine: --base NAME",
    )
    source = locked_torch(context.site, record)
    into = into.absolute()
    _make_room(into)
    with local_target(lock, into, into, logs, reporter) as place:
        done = install(lock, place, source.uv_args(), reporter, scope)
    return place, done


@contextlib.contextmanager
def local_target(
    lock: LockDirectory, venv: Path, disk: Path, logs: Path, reporter: Reporter
) -> Iterator[InstallTarget]:
    """An environment on this machine, for as long as it is being installed."""
    with installing_uv() as environment:
        yield InstallTarget(
            uv=str(uv_program()),
            lock=str(lock.path.absolute()),
            python=lock.lock.base.python,
            venv=str(venv),
            run=LocalCommands(environment, reporter),
            disk=disk,
            logs=logs,
        )


def import_modules(
    lock: LockDirectory, place: InstallTarget, scope: InstallScope, target: Target, reporter: Reporter
) -> Imports:
    """Import the modules of the scope's phases; those of the others, and of what was left out, are not checked."""
    # PYTHONPATH and the like would let a module import what was not installed.
    plain = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV" and not key.startswith("PYTHON")}
    environment = plain | check_environment(target) | lock.lock.variables(place.venv)
    phases, leave_out = scope.phases, scope.leave_out
    # A commit is installed in phase git, whatever the phase of its component.
    phase_of = {name: "git" if item.commit else item.phase.value for name, item in lock.lock.components.items()}
    modules = modules_of(lock.lock)
    left_out = {name: names for name, names in modules.items() if phase_of[name] not in phases or name in leave_out}
    absent_phases = tuple(phase for phase in PHASE_FILES if phase not in phases and lock.file(phase))
    absent = Absent(
        phases=absent_phases,
        packages=frozenset([*locked_content(lock, absent_phases), *leave_out]),
        modules=frozenset(module for names in left_out.values() for module in names),
    )
    with tempfile.TemporaryDirectory(prefix="envbuild-import-") as scratch:
        # What modules compile when they are imported must not meet what others compiled against another torch.
        variables = {**environment, "TORCH_EXTENSIONS_DIR": scratch}
        present = {name: names for name, names in modules.items() if name not in left_out}
        probe = ImportProbe(
            python=place.venv_python,
            program=str(data_root() / PROBE),
            run=LocalCommands(variables, None),
            logs=place.logs,
        )
        found = try_imports(present, probe, reporter, absent=absent)
    skipped = tuple(
        NotChecked(
            module=module,
            component=name,
            reason=NEVER_BUILT if name in leave_out else f"phase {phase_of[name]} is not installed",
        )
        for name, names in left_out.items()
        for module in names
    )
    return replace(found, not_checked=found.not_checked + skipped)


def _make_room(into: Path) -> None:
    """Remove the environment that is there; anything else stays and is refused."""
    with machine_errors(into):
        # pyvenv.cfg makes a folder an environment (PEP 405).
        if (into / "pyvenv.cfg").is_file():
            remove_tree(into)
        elif into.exists() and not (into.is_dir() and not any(into.iterdir())):
            raise UsageError(
                f"{into} exists and is not an environment",
                why="An environment is made anew, and what is in its place would be lost.",
                fix="Name another folder, or remove this one yourself.",
            )
