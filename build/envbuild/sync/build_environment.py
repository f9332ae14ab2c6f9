"""The environment that wheels are compiled in: a lock's phase main, installed once and kept."""

from __future__ import annotations

import re
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.catalog.models import Target
from envbuild.catalog.site import Site
from envbuild.core.digests import digest_of
from envbuild.core.errors import BuildError
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.torch_builds import TorchSource, locked_torch
from envbuild.store.local import LocalStore
from envbuild.sync.install import InstallScope, install_packages, make_venv
from envbuild.sync.install_target import InstallTarget
from envbuild.sync.local import local_target, other_machine, refuse_without_base
from envbuild.wheels.audit.prebuilt import check_prebuilt, site_packages_of
from envbuild.wheels.cache.entry import ENVIRONMENTS_KIND as KIND

PHASES = ("main",)
# What every build needs.
TORCH = "torch"
# uv 0.13.8: Because nvidia-resiliency-ext{sys_platform == 'linux'}==0.6.0 has no wheels with a matching platform tag
_NO_WHEEL_HERE = re.compile(r"Because ([\w.-]+)(?:\{[^}]*\})?==\S+ has no wheels with a matching platform tag")


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
            _install_what_fits(lock, place, source, reporter)

    return store.make_in_place(KIND, key, "build environment", is_whole, make) / "venv"


def build_environment_for(lock: LockDirectory, target: Target, context: Context) -> Path:
    """The same for a target; hours of compiling are for nothing where its own GPU code does not run there."""
    made = build_environment(lock, context.site, context.store, context.reporter)
    check_prebuilt(site_packages_of(made), target.sm, context.store, context.reporter)
    return made


def _install_what_fits(lock: LockDirectory, place: InstallTarget, source: TorchSource, reporter: Reporter) -> None:
    """Install phase main; where this machine's glibc is older than the base's, without what needs the newer one.

    A wheel's key has torch, the packages with headers and the build's own requirements: no other package has a part in
    a build. nvidia-resiliency-ext 0.6.0, for one, has wheels for glibc 2.39 alone, and Debian 12 has 2.36.
    """
    make_venv(place, sees_base=False)
    left_out: frozenset[str] = frozenset()
    while unfit := _unfit(lock, place, source, reporter, left_out):
        left_out |= unfit
        names = ", ".join(sorted(unfit))
        reporter.note(f"note: not in the build environment, for they need a newer glibc: {names}")


def _unfit(
    lock: LockDirectory, place: InstallTarget, source: TorchSource, reporter: Reporter, left_out: frozenset[str]
) -> frozenset[str]:
    """Install phase main without some packages; if it fails for others that need the base's newer glibc, these."""
    try:
        install_packages(lock, place, source, reporter, InstallScope(phases=PHASES, leave_out=left_out))
    except BuildError as error:
        unfit = frozenset(_NO_WHEEL_HERE.findall(error.why)) - left_out
        base = lock.lock.base
        if not unfit or TORCH in unfit or not other_machine(base.platform, base.glibc):
            raise
        return unfit
    return frozenset()
