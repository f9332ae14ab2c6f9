"""The environment that wheels are compiled in: a lock's phase main, installed once and kept."""

from __future__ import annotations

from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.digests import digest_of
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.store.local import LocalStore
from envbuild.sync.install import InstallScope, install
from envbuild.sync.local import local_target
from envbuild.sync.machine import refuse_without_base
from envbuild.wheels.cache.entry import ENVIRONMENTS_KIND as KIND

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
    # Not by the lock's digest: locks that differ in their compile phase alone share the environment.
    key = digest_of({"phases": [*digests], "python": lock.lock.base.python, "torch": lock.lock.torch.build})

    def is_whole(folder: Path) -> bool:
        return (folder / "venv/bin/python").exists()

    def make(folder: Path) -> None:
        source = locked_torch(site, lock.lock)
        with local_target(lock, folder / "venv", folder, store.root / "logs" / "wheels", reporter) as place:
            install(lock, place, source.uv_args(), reporter, InstallScope(phases=PHASES))

    return store.make_in_place(KIND, key, "build environment", is_whole, make) / "venv"
