"""Compares a virtual environment with the wheels of its lock, whatever its own RECORDs say.

The runner compares files with RECORD. Who changes both is found here: the lock is installed once more by uv, which
holds each wheel to its hash, and the RECORDs of both must agree.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.context import Context
from envbuild.certify.models import Problem
from envbuild.core.digests import Json, digest_of
from envbuild.lock.lockfile import LockDirectory
from envbuild.sync.install import InstallScope
from envbuild.sync.local import fill_environment
from envbuild.wheels.audit.prebuilt import site_packages_of

KIND, FILE = "wheel-records", "records.json"
# Packages of the other phases are built, and what a compiler writes is not the same everywhere.
PHASE = "main"


def locked_records(lock: LockDirectory, context: Context) -> dict[str, str]:
    """The digest of each wheel's RECORD, by package; installed once for each lock, and kept in the store.

    Raises:
        BuildError, NetworkError, MachineError: the lock does not install on this machine.
    """
    record = lock.lock
    if record.base.provides:
        # What the base brings is not here to install the rest over.
        return {}
    key = digest_of([record.phases[PHASE].digest, record.torch.build, record.base.python])

    def build(content: Path) -> None:
        with context.store.staging(KIND) as folder, context.reporter.step("read the files of the lock's wheels"):
            scope = InstallScope(phases=(PHASE,))
            fill_environment(lock, folder / "venv", scope, context.store.root / "logs" / KIND, context)
            (content / FILE).write_text(json.dumps(installed_records(folder / "venv")))

    entry = context.store.get_or_build(KIND, key, build)
    records: dict[str, str] = json.loads((entry.path / FILE).read_text())
    return records


def record_problems(locked: dict[str, str], environment: Path) -> list[Problem]:
    """The packages whose RECORD is not that of the lock's wheel; the runner reports those that are absent."""
    installed = installed_records(environment) if locked else {}
    return [
        Problem(
            check="environment",
            text=f"{package}: its RECORD lists other files than the lock's wheel has: it was changed after the "
            "installation. Install the lock again (envbuild sync)",
        )
        for package, digest in locked.items()
        if installed.get(package, digest) != digest
    ]


def installed_records(environment: Path) -> dict[str, str]:
    """The digest of what each RECORD lists, by package, without packages that were compiled on a machine."""
    records = (info for info in site_packages_of(environment).glob("*.dist-info") if (info / "RECORD").is_file())
    return {
        canonicalize_name(info.name.removesuffix(".dist-info").rpartition("-")[0]): digest_of(_rows(info))
        for info in records
        if not _was_compiled(info)
    }


def _was_compiled(info: Path) -> bool:
    # Indexes take no wheel for "linux" as such: one with that tag was built here or where it was installed from.
    wheel = info / "WHEEL"
    tags = [line for line in wheel.read_text().splitlines() if line.startswith("Tag:")] if wheel.is_file() else []
    return any("-linux_" in tag for tag in tags)


def _rows(info: Path) -> dict[str, Json]:
    """The hash of each file of a package; without what installers write, which differs between them."""
    rows = csv.reader((info / "RECORD").read_text().splitlines())
    listed = {row[0]: row[1] for row in rows if len(row) == 3 and row[1] and ".dist-info/" not in row[0]}
    return {name: hash_ for name, hash_ in listed.items() if not name.endswith(".pyc") and not name.startswith("../")}
