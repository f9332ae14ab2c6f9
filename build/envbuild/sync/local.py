"""Installs a lock into an environment on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import MACHINES
from envbuild.catalog.models import Target
from envbuild.core.errors import MachineError, UsageError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.models import Lock
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.settings import installing_uv
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.sync.driver_start import make_stub, variables_with_stub
from envbuild.sync.imports import PROBE, ImportProbe, NotChecked, check_environment, fix_of, import_modules
from envbuild.sync.install import InstallScope, PhaseRun, add_files, install
from envbuild.sync.install_target import InconclusiveError, InstallTarget
from envbuild.wheels.audit.binary import version_key
from envbuild.wheels.audit.prebuilt import PackageCode, check_prebuilt, site_packages_of


def other_machine(base_platform: str, base_glibc: str) -> str:
    """Why a base's packages do not run here: another architecture, or an older glibc; empty where they do.

    Python is not looked at: uv looks for it.

    Args:
        base_platform: the base's, such as ``linux/amd64``.
    """
    machine, glibc = platform.machine(), platform.libc_ver()[1]  # no glibc where there is another C library
    wanted = MACHINES[base_platform]
    if machine != wanted:
        return f"The base is for {wanted}; this machine is {machine}."
    # By numbers: as texts, 2.100 would be older than 2.36.
    if not glibc or version_key(glibc) < version_key(base_glibc):
        here = glibc or "none"
        return f"The base has glibc {base_glibc}; this machine has {here}, and wheels may need the newer one."
    return ""


def refuse_without_base(lock: Lock) -> None:
    """A lock that counts on packages of its base cannot be installed on a machine.

    Raises:
        MachineError: the base brings packages; names them.
    """
    provides = lock.base.provides
    if not provides:
        return
    brought = ", ".join(f"{name} {version}" for name, version in sorted(provides.items()))
    raise MachineError(
        f"the lock of stack {lock.stack} cannot be installed without its base {lock.base.name}",
        why=f"The base brings {brought}; the lock leaves them out, and this machine does not have them.",
        fix="Lock the stack on a base that brings nothing, and install that: envbuild lock --base NAME. Inside the "
        "base's container, the lock's own files install into an environment made with --system-site-packages.",
    )


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
            options=ProcessOptions(env=self.environment, timeout_seconds=timeout_seconds, error=InconclusiveError),
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
    with local_probe(lock, place, target) as probe:
        imports = import_modules(lock, scope, probe, context.reporter).refuse_failed(fix_of(lock.lock))
    return Synced(
        phases=done,
        imported=imports.imported,
        not_checked=imports.not_checked,
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
    # Before the environment that is there is removed.
    if problem := other_machine(base.platform, base.glibc):
        raise MachineError(
            f"the lock of stack {record.stack} on base {base.name} cannot be installed on this machine",
            why=problem,
            fix="Install it on a machine like the base, build the image (`envbuild image`), which has the base itself, "
            "or lock the stack on a base like this machine: --base NAME",
        )
    source = locked_torch(context.site, record)
    into = into.absolute()
    _make_room(into)
    with local_target(lock, into, into, logs, reporter) as place:
        done = install(lock, place, source, reporter, scope)
    add_files(lock, Path(record.site_packages(str(into))))
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


@contextlib.contextmanager
def local_probe(lock: LockDirectory, place: InstallTarget, target: Target) -> Iterator[ImportProbe]:
    """What imports modules of a filled environment on this machine."""
    # PYTHONPATH and the like would let a module import what was not installed.
    plain = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV" and not key.startswith("PYTHON")}
    environment = plain | check_environment(target) | lock.lock.variables(place.venv)
    with tempfile.TemporaryDirectory(prefix="envbuild-import-") as scratch:
        # What modules compile when they are imported must not meet what others compiled against another torch.
        variables = {**environment, "TORCH_EXTENSIONS_DIR": scratch}
        run = LocalCommands(variables, None)
        stub = Path(scratch) / "driver"
        with_stub = LocalCommands(variables_with_stub(variables, str(stub)), None)
        has_stub = make_stub(run, stub, str(stub), place.logs / "driver-stub.log")
        yield ImportProbe(
            python=place.venv_python,
            program=str(data_root() / PROBE),
            run=run,
            logs=place.logs,
            run_with_stub=with_stub if has_stub else None,
        )


def _make_room(into: Path) -> None:
    """Remove the environment that is there; anything else, and the one that runs envbuild, stays and is refused."""
    with machine_errors(into):
        if into.resolve() == Path(sys.prefix).resolve():
            raise UsageError(
                f"{into} is the environment that envbuild runs from",
                why="An environment is made anew, and envbuild and its uv would be removed first.",
                fix="Name another folder.",
            )
        # pyvenv.cfg makes a folder an environment (PEP 405).
        if (into / "pyvenv.cfg").is_file():
            remove_tree(into)
        elif into.exists() and not (into.is_dir() and not any(into.iterdir())):
            raise UsageError(
                f"{into} exists and is not an environment",
                why="An environment is made anew, and what is in its place would be lost.",
                fix="Name another folder, or remove this one yourself.",
            )
        # Here, for uv's refusal to write it would read as a build that failed.
        into.mkdir(parents=True, exist_ok=True)
