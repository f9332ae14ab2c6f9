"""Where a lock is verified: a place that can be filled with an environment and import its modules."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from envbuild.catalog.base import Base
from envbuild.catalog.context import Context
from envbuild.catalog.models import Target
from envbuild.core.digests import Json
from envbuild.core.process import ProcessOptions, run
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.interpreter import pyenv_python
from envbuild.lock.uv.program import python_help, uv_program
from envbuild.lock.uv.settings import installing_uv
from envbuild.sync.imports import ImportProbe
from envbuild.sync.install import InstallScope, make_venv
from envbuild.sync.install_target import InstallTarget
from envbuild.sync.local import LocalCommands, fill_environment, local_probe, other_machine
from envbuild.wheels.audit.prebuilt import site_packages_of
from envbuild.wheels.cache.wheelhouse import NO_BUILT, Built


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is installed of a lock to verify it.

    Attributes:
        base: the lock's, for which sources are looked up.
        wheels: wheels of the wheelhouse, by package.
        leave_out: packages that are not there.
        stubs: packages that are not built: the extension module by package, of which a stub is there.
        folders: of those, the folders of their sources that are there as they are.
    """

    lock: LockDirectory
    target: Target
    base: Base
    phases: tuple[str, ...]
    wheels: Mapping[str, Built] = field(default_factory=lambda: NO_BUILT)
    leave_out: frozenset[str] = frozenset()
    stubs: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def scope(self) -> InstallScope:
        """What is installed, for an installation on this machine."""
        wheels = {name: str(built.wheel) for name, built in self.wheels.items()}
        return InstallScope(phases=self.phases, wheels=wheels, leave_out=self.leave_out | self.stubs.keys())

    @property
    def import_scope(self) -> InstallScope:
        """What is imported: the installed packages, and those with a stub."""
        return InstallScope(phases=self.phases, leave_out=self.leave_out)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A filled environment.

    Attributes:
        venv: its path as it is seen from where modules are imported.
        site_packages: the folder of this machine with its packages.
        base_image: the digest of the image of the lock's own base, in which it is; empty in another place.
        base_made_at: when that base was made.
    """

    venv: str
    where: str
    site_packages: Path
    probe: ImportProbe
    base_image: str = ""
    base_made_at: str = ""


class Place(Protocol):
    """A place to verify locks in."""

    @property
    def where(self) -> str:
        """The place, for people."""

    @property
    def key(self) -> Json:
        """What names the place in the key of a result."""

    def problem(self) -> str:
        """Why nothing can be verified there, as far as it can be said at once; empty if nothing stands against it."""

    def prepare(self) -> None:
        """Make what is needed before an environment can be filled.

        Raises:
            EnvbuildError: it cannot be had.
        """

    def fill(self, trial: Trial, logs: Path) -> AbstractContextManager[Filled]:
        """Install a lock, for as long as the block runs.

        Raises:
            BuildError: a package does not install.
            NetworkError: an index cannot be reached.
        """


@dataclass(frozen=True)
class ThisMachine:
    """The machine itself, where its glibc is as new as the base's and uv finds a Python."""

    base: Base
    context: Context

    @property
    def where(self) -> str:
        return f"this machine (glibc {platform.libc_ver()[1]}, Python {self.base.python.version})"

    @property
    def key(self) -> Json:
        return ["machine", *platform.libc_ver(), self.base.python.version]

    def problem(self) -> str:
        if self.base.provides:
            return "the base brings packages that this machine does not have"
        return other_machine(self.base.platform, self.base.glibc) or _missing_python(self.base.python.version)

    def prepare(self) -> None:
        """Have uv look for the Python, or download it, in an environment that goes at once."""
        with self.context.store.staging("verify") as folder, installing_uv() as environment:
            place = InstallTarget(
                uv=str(uv_program()),
                lock="",
                python=self.base.python.version,
                venv=str(folder / "venv"),
                run=LocalCommands(environment, None),
                disk=folder,
                logs=folder,
            )
            make_venv(place, sees_base=False)

    @contextlib.contextmanager
    def fill(self, trial: Trial, logs: Path) -> Iterator[Filled]:
        with self.context.store.staging("verify") as folder:
            venv = folder / "venv"
            place, _ = fill_environment(trial.lock, venv, trial.scope, logs, self.context)
            with local_probe(trial.lock, place, trial.target) as probe:
                python = self.base.python.version
                # A base names no patch release, and uv takes any.
                where = self.where.replace(f"Python {python}", f"Python {_python_version(venv) or python}")
                yield Filled(venv=str(venv), where=where, site_packages=site_packages_of(venv), probe=probe)


def _missing_python(version: str) -> str:
    """Why uv makes no environment of a Python: it is not here, and not to be downloaded; empty: it may."""
    with installing_uv() as environment:
        # It lists what is here, and what it would download by itself.
        listed = run(
            [uv_program(), "--color", "never", "python", "list", version],
            what=f"look for Python {version}",
            check=False,
            options=ProcessOptions(env=environment),
        )
    if re.search(r"^cpython-", listed.output, re.MULTILINE) or pyenv_python(version) is not None:
        return ""
    return f"Python {version} is missing, and uv may not download it.\n{python_help(version)}"


def _python_version(venv: Path) -> str:
    """The version of an environment's interpreter, with its patch release."""
    # uv's key for it; PEP 405 names none.
    match = re.search(r"^version_info = (\d+\.\d+\.\d+)", (venv / "pyvenv.cfg").read_text(), re.MULTILINE)
    return match[1] if match else ""
