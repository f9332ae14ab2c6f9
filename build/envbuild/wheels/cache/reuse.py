"""Which wheels of the wheelhouse a lock is installed with on a target, so that they are not compiled again."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.core.errors import MachineError
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.remote import Remote
from envbuild.wheels.audit.binary import version_key
from envbuild.wheels.cache.entry import source_index
from envbuild.wheels.cache.wheelhouse import Built, Wheelhouse
from envbuild.wheels.key import KeyParts
from envbuild.wheels.plan import WheelPlan, buildable, plan_wheels
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolchain import Compilers, find_toolchain


def fitting_wheels(
    lock: LockDirectory,
    target: Target,
    catalog: Catalog,
    sources: WheelSources,
    remotes: Sequence[Remote] = (),
) -> dict[str, Built]:
    """The wheels of the wheelhouse that are those of the lock for the target, by package.

    Where this machine has the compilers, the wheel with the very key is taken first. Any other fits too if its key
    differs in nothing but the compilers' versions, as it does on a machine without compilers: of these the one with the
    newest CUDA toolkit. What is not here is looked for in the remote stores. A damaged wheel is left out, and that is
    said.

    Raises:
        NetworkError: a remote store cannot be reached or refuses.
    """
    cuda = lock.lock.base.cuda
    if cuda is None or target.device is not Device.CUDA:
        return {}
    wheelhouse = Wheelhouse(sources.store, remotes)
    known = buildable(lock)
    here = [built for built in wheelhouse.all() if any(origin.is_of(built.record.parts) for origin in known.values())]
    remote_sources = {ref.index_path[0] for _, ref in wheelhouse.remote.entry_refs if ref.index_path}
    names: set[str] = {canonicalize_name(built.record.parts.package) for built in here}
    names |= {name for name, origin in known.items() if source_index(origin.sdist or origin.commit) in remote_sources}
    if not names:
        return {}
    try:
        compilers: Compilers = find_toolchain(cuda)
    except MachineError:
        # Without compilers there is no exact key to look for; wheels that fit in all else are enough.
        compilers = Compilers(cuda="", host="")
    chosen = {}
    for plan in plan_wheels(lock, sorted(names), target, catalog, compilers, sources):
        fitting = [built for built in here if _rank(built.record.parts, plan, cuda) is not None]
        best = _best(wheelhouse, fitting, plan, cuda, sources.reporter)
        if best is None or best.record.key != plan.parts.key:
            best = _from_remote(wheelhouse, plan, cuda, exact=best is not None) or best
        if best is not None:
            chosen[plan.parts.package] = wheelhouse.mark_used(best)
    return chosen


def _best(wheelhouse: Wheelhouse, fitting: list[Built], plan: WheelPlan, cuda: str, reporter: Reporter) -> Built | None:
    for built in sorted(
        fitting, key=lambda built: (_rank(built.record.parts, plan, cuda), built.record.key), reverse=True
    ):
        if problem := wheelhouse.problem(built):
            reporter.note(f"the wheel of {plan.name} in the wheelhouse is not taken: {problem}")
            continue
        return built
    return None


def _from_remote(wheelhouse: Wheelhouse, plan: WheelPlan, cuda: str, *, exact: bool) -> Built | None:
    """The best wheel of the remote stores, or only the one with the very key."""

    def rank(parts: KeyParts) -> tuple[int, ...] | None:
        return _rank(parts, plan, cuda) if parts.key == plan.parts.key or not exact else None

    key = wheelhouse.remote.fetch_fitting(plan.parts, rank)
    return wheelhouse.find(key) if key else None


def _rank(parts: KeyParts, plan: WheelPlan, cuda: str) -> tuple[int, ...] | None:
    """How well a wheel with these parts stands in for a planned one; None: not at all."""
    # 13.0.88 and 13.0.99 are both CUDA 13.0, which the lock's torch is made for; 13.1.1 is not.
    if not parts.fits(plan.parts) or parts.cuda_toolkit.rpartition(".")[0] != cuda:
        return None
    return int(parts.key == plan.parts.key), *version_key(parts.cuda_toolkit)
