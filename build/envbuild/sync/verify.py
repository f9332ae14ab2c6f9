"""``lock --verify``: a lock's main phase in a throw-away environment, and its modules imported there."""

from __future__ import annotations

from dataclasses import dataclass, field

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.files import remove_tree
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.verification import Verified
from envbuild.sync.imports import FIX, Imports
from envbuild.sync.install import InstallScope
from envbuild.sync.local import fill_environment, import_modules
from envbuild.sync.machine import refuse_other_machine

CODE = "import"
SCOPE = InstallScope(phases=("main",))


@dataclass
class Verifier:
    """Accepts a lock whose main phase installs and imports here.

    Attributes:
        imports: what was found the last time; None before.
    """

    context: Context
    imports: Imports | None = field(default=None, init=False)

    @staticmethod
    def require_machine(base: Base) -> None:
        """Whether what is locked for a base runs on this machine; its Python is looked for when it is installed.

        Raises:
            MachineError: it does not.
        """
        refuse_other_machine(
            base.platform,
            base.glibc,
            what="the lock cannot be verified on this machine",
            fix="Run --verify where the base's wheels run, lock without it, or build the image (`envbuild image`), "
            "which imports the modules inside the base itself.",
        )

    def __call__(self, selection: Selection, lock: LockDirectory) -> Verified:
        """A finding for each module that does not import.

        Raises:
            BuildError: a package does not install.
            MachineError: there is no Python of the base's version.
        """
        logs = self.context.store.root / "logs" / f"verify-{lock.lock.stack}-{lock.lock.base.name}"
        # Logs are appended to, and where a module hangs is read from its log.
        remove_tree(logs)
        with self.context.store.staging("verify") as folder:
            venv = folder / "venv"
            place, _ = fill_environment(lock, venv, SCOPE, logs, self.context)
            self.imports = import_modules(lock, place, SCOPE, selection.target, self.context.reporter)
        findings = tuple(
            CheckFinding(
                code=CODE,
                # Findings that are let pass go into the record, which names no place.
                what=f"{item.module} of {item.component} does not import: {item.cause.replace(str(venv), '{venv}')}",
                fix=f"{FIX}\n  log: {item.log}",
            )
            for item in self.imports.failed
        )
        return Verified(where="this machine", imported=self.imports.imported, findings=findings)
