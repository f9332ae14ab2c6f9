"""Which wheels of the wheelhouse a lock is installed with on a target, so that they are not compiled again."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Device, Target
from envbuild.core.errors import MachineError
from envbuild.core.progress import Reporter
from envbuild.lock.record import LockDirectory
from envbuild.wheels.elf import version_key
from envbuild.wheels.key import Parts
from envbuild.wheels.planning import buildable, plan_wheels
from envbuild.wheels.sources import Origin, Sources
from envbuild.wheels.toolchain import Compilers, find_toolchain
from envbuild.wheels.wheelhouse import Built, Wheelhouse


def fitting_wheels(
    lock: LockDirectory, target: Target, catalog: Catalog, sources: Sources, reporter: Reporter
) -> dict[str, Built]:
    """The wheels of the wheelhouse that are those of the lock for the target, by package.

    Where this machine has the compilers, the wheel with the very key is taken first. Any other fits too if its key
    differs in nothing but the compilers' versions, as it does on a machine without compilers: of these the one with the
    newest CUDA toolkit. A damaged wheel is left out, and that is said.
    """
    wheelhouse = Wheelhouse(sources.store)
    known = buildable(lock)
    here = [item for item in wheelhouse.all() if _is_of(item.record.parts, known)]
    cuda = lock.lock.base.cuda
    if not here or cuda is None or target.device is not Device.CUDA:
        return {}
    try:
        compilers: Compilers = find_toolchain(cuda)
    except MachineError:
        compilers = Compilers(cuda="", host="")
    names = sorted({canonicalize_name(item.record.parts.package) for item in here})
    found = {}
    for plan in plan_wheels(lock, names, target, catalog, compilers, sources):
        fitting = [item for item in here if _fits(item.record.parts, plan.parts, cuda)]
        for item in sorted(fitting, key=lambda item: _rank(item, plan.parts.key), reverse=True):
            if problem := wheelhouse.problem(item):
                reporter.note(f"the wheel of {plan.name} in the wheelhouse is not taken: {problem}")
                continue
            found[plan.parts.package] = item
            break
    return found


def _is_of(parts: Parts, known: Mapping[str, Origin]) -> bool:
    """Whether a wheel was built from the sources that a lock has for its package."""
    origin = known.get(parts.package)
    return origin is not None and (origin.sdist, origin.commit) == (parts.sdist, parts.commit)


def _fits(parts: Parts, wanted: Parts, cuda: str) -> bool:
    return parts.fits(wanted) and parts.cuda_toolkit.rpartition(".")[0] == cuda


def _rank(item: Built, key: str) -> tuple[bool, tuple[int, ...], str]:
    return item.record.key == key, version_key(item.record.parts.cuda_toolkit), item.record.key
