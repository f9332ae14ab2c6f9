"""Verification: a lock in a throw-away environment, and its modules imported there."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.core.digests import digest_of, sha256_file, short
from envbuild.core.errors import BuildError
from envbuild.core.files import remove_tree, write_atomic
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.verification import Verified
from envbuild.sync import failure_packages
from envbuild.sync.imports import FIX, PROBE, NotImported
from envbuild.sync.install import InstallScope
from envbuild.sync.installed_packages import InstalledPackages
from envbuild.sync.local import fill_environment, import_modules
from envbuild.sync.machine import refuse_other_machine
from envbuild.wheels.audit.prebuilt import site_packages_of

KIND = "verifications"
RESULT_FILE = "verified.json"
IMPORT_CODE = "import"
INSTALL_CODE = "install"
SCOPE = InstallScope(phases=("main", "git"))
INSTALL_FIX = (
    "The lock resolves, and a package of it does not install: its build fails, or it has no file for this base. Take "
    "another version of it (--pin, or the stack's file), or leave it out under [requirements] of the stack."
)
_VERIFIED = TypeAdapter(Verified)


@dataclass
class Verifier:
    """Installs the phases main and git of a lock, and imports its modules. Results are kept in the store.

    Attributes:
        verified: the last result; None before.
    """

    context: Context
    verified: Verified | None = field(default=None, init=False)

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
        """What became of it: a finding for each module that does not import, and for what does not install.

        Raises:
            MachineError: there is no Python of the base's version.
            NetworkError: an index cannot be reached.
        """
        store, key = self.context.store, _key(selection, lock)
        if found := store.find(KIND, key):
            self.verified = _VERIFIED.validate_json((found / RESULT_FILE).read_bytes())
            return self.verified
        logs = store.root / "logs" / f"verify-{short(key)}"
        # Logs are appended to, and where a module hangs is read from its log.
        remove_tree(logs)
        self.verified, lasting = self._verify(selection, lock, logs)
        if lasting:
            content = _VERIFIED.dump_json(self.verified)
            store.get_or_build(KIND, key, lambda folder: write_atomic(folder / RESULT_FILE, content))
        if not self.verified.findings:
            remove_tree(logs)
        return self.verified

    def _verify(self, selection: Selection, lock: LockDirectory, logs: Path) -> tuple[Verified, bool]:
        """The result, and whether it would be the same another time: a build may have failed for this machine."""
        where = f"this machine (glibc {platform.libc_ver()[1]}, Python {lock.lock.base.python})"
        # A build without isolation takes a compiler, as those of phase compile do.
        scope = replace(SCOPE, leave_out=frozenset(lock.shared_builds))
        with self.context.store.staging("verify") as folder:
            venv = folder / "venv"
            try:
                place, _ = fill_environment(lock, venv, scope, logs, self.context)
            except BuildError as error:
                return Verified(where=where, imported=(), findings=(_not_installed(error, lock, venv),)), False
            imports = import_modules(lock, place, scope, selection.target, self.context.reporter)
            installed = InstalledPackages(site_packages_of(venv))
            verified = Verified(
                where=where.replace(lock.lock.base.python, _python_version(venv) or lock.lock.base.python),
                imported=imports.imported,
                not_checked=tuple(f"{item.module} ({item.component}): {item.reason}" for item in imports.not_checked),
                findings=tuple(_not_imported(item, installed, venv) for item in imports.failed),
            )
        return verified, all(item.raised for item in imports.failed)


def _key(selection: Selection, lock: LockDirectory) -> str:
    """What a result depends on: the lock, the place, the GPUs that modules are told of, and the probe."""
    return digest_of(
        {
            "lock": lock.lock.digest,
            "where": ["machine", *platform.libc_ver()],
            "sm": list(selection.target.sm),
            "phases": list(SCOPE.phases),
            "probe": sha256_file(data_root() / PROBE),
        }
    )


def _python_version(venv: Path) -> str:
    """The version of an environment's interpreter, with its patch release."""
    found = re.search(r"^version_info = (\d+\.\d+\.\d+)", (venv / "pyvenv.cfg").read_text(), re.MULTILINE)
    return found[1] if found else ""


def _not_imported(item: NotImported, installed: InstalledPackages, venv: Path) -> CheckFinding:
    about = failure_packages.of_import(item.output, installed)
    return CheckFinding(
        code=IMPORT_CODE,
        # Findings that are let pass go into the record, which names no place.
        what=f"{item.module} of {item.component} does not import: {item.cause.replace(str(venv), '{venv}')}",
        fix=f"{FIX}\n  log: {item.log}",
        packages=about.packages,
        missing_module=about.missing_module,
    )


def _not_installed(error: BuildError, lock: LockDirectory, venv: Path) -> CheckFinding:
    output = error.log.read_text(errors="replace") if error.log else error.why
    packages = failure_packages.of_installation(output, lock.packages())
    cause = failure_packages.cause_of_installation(output)
    return CheckFinding(
        code=INSTALL_CODE,
        what=f"{', '.join(packages) or 'a package'} does not install: {cause.replace(str(venv), '{venv}')}",
        fix=f"{INSTALL_FIX}\n  log: {error.log}",
        packages=packages,
    )
