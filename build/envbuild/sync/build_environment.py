"""The environment that wheels are compiled in: a lock's phase main, installed once and kept."""

from __future__ import annotations

from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core import locks
from envbuild.core.digests import digest_of, short
from envbuild.core.files import machine_errors, remove_tree, write_atomic
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.store.local import LocalStore
from envbuild.sync.install import InstallScope, install
from envbuild.sync.local import local_target
from envbuild.sync.provided import refuse_without_base
from envbuild.wheels.cache.entry import ENVIRONMENTS_KIND as KIND

# Written last: an environment without it is half made.
COMPLETE = "complete"
PHASES = ("main",)


def build_environment(lock: LockDirectory, site: Site, store: LocalStore, reporter: Reporter) -> Path:
    """The virtual environment with phase main of a lock; installed when it is not in the store.

    It stays where it was made, since environments cannot be moved, and is named by what is installed in it.

    Raises:
        BuildError: a package does not install.
        MachineError: there is no Python of the base's version, or the base brings packages that are not here.
        NetworkError: an index cannot be reached.
    """
    refuse_without_base(lock.lock)
    digests = [lock.lock.phases[name].digest for name in PHASES]
    key = digest_of({"phases": [*digests], "python": lock.lock.base.python, "torch": lock.lock.torch.build})
    folder = store.path_of(KIND, key)
    held = store.root / "locks" / f"{KIND}-{folder.name}.lock"
    waiting = f"another envbuild is making build environment {short(key)}: waiting for it"
    with locks.exclusive(held, on_wait=lambda: reporter.note(waiting)):
        venv = folder / "venv"
        if not ((folder / COMPLETE).is_file() and (venv / "bin" / "python").exists()):
            with machine_errors(folder):
                remove_tree(folder)
                folder.mkdir(parents=True)
            _install(lock, venv, site, store.root / "logs" / "wheels", reporter)
            write_atomic(folder / COMPLETE, f"{lock.lock.digest}\n")
        store.use(KIND, key)
    return venv


def _install(lock: LockDirectory, venv: Path, site: Site, logs: Path, reporter: Reporter) -> None:
    source = locked_torch(site, lock.lock)
    with local_target(lock, venv, venv.parent, logs, reporter) as place:
        install(lock, place, source.uv_args(), reporter, InstallScope(phases=PHASES))
