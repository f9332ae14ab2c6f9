"""Builds the wheels that are not in the wheelhouse yet, checks them, and keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from envbuild.core.digests import sha256_file, short
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore
from envbuild.wheels.build import Bench, build_wheel, jobs_for, machine_limits
from envbuild.wheels.check import Checked, check_wheel
from envbuild.wheels.planning import WheelPlan
from envbuild.wheels.sources import Sources
from envbuild.wheels.toolchain import Toolchain
from envbuild.wheels.wheelhouse import Built, Wheelhouse, WheelRecord, fill


def make_wheels(
    plans: Sequence[WheelPlan],
    *,
    environment: Callable[[], Path],
    toolchain: Toolchain,
    sources: Sources,
    store: LocalStore,
    reporter: Reporter,
    jobs: int | None = None,
    wheelhouse: Wheelhouse | None = None,
) -> tuple[Built, ...]:
    """The wheels of ``plans``, one after the other; what is in the wheelhouse is taken from there.

    Args:
        environment: gives the virtual environment with the lock's phase main; asked for only when something is built.
        jobs: compilers at once; without it as many as cores and memory allow.
        wheelhouse: the store's, with what is beside it.

    Raises:
        BuildError: a wheel does not build; those built before it are kept.
        CheckRefusedError: a wheel is not what was asked for, and was not kept.
    """
    wheelhouse = wheelhouse or Wheelhouse(store)
    made = []
    for plan in plans:
        found = wheelhouse.find(plan.parts.key)
        if found is None:
            log = store.root / "logs" / "wheels" / f"{plan.parts.package}-{short(plan.parts.key)}.log"
            maker = _Maker(plan, environment, toolchain, sources, store, reporter, jobs, log)
            found = wheelhouse.get_or_build(plan.parts.key, maker)
        made.append(found)
    return tuple(made)


class _Maker:
    """Fills the entry of one wheel."""

    def __init__(
        self,
        plan: WheelPlan,
        environment: Callable[[], Path],
        toolchain: Toolchain,
        sources: Sources,
        store: LocalStore,
        reporter: Reporter,
        jobs: int | None,
        log: Path,
    ) -> None:
        self._plan = plan
        self._environment = environment
        self._toolchain = toolchain
        self._sources = sources
        self._store = store
        self._reporter = reporter
        self._jobs = jobs
        self._log = log

    def __call__(self, entry: Path) -> None:
        plan, parts = self._plan, self._plan.parts
        environment = self._environment()
        sdist = self._sources.sdist(parts.package, parts.version, parts.sdist)
        jobs = self._jobs or jobs_for(plan.recipe.job_memory_gib, *machine_limits())
        with machine_errors(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(self._log)
        with self._store.staging("wheel-build") as folder:
            bench = Bench(environment=environment, toolchain=self._toolchain, folder=folder, log=self._log, jobs=jobs)
            title = f"build {plan.name} for {plan.asked.text()}, {jobs} at once"
            with self._reporter.step(title):
                started = time.monotonic()
                wheel = build_wheel(plan, sdist, bench, self._reporter)
                seconds = time.monotonic() - started
            with self._reporter.step(f"check {wheel.name}"):
                checked = check_wheel(wheel, plan, environment, folder / "unpacked", self._log)
            fill(entry, wheel, _record(plan, wheel, checked, seconds, jobs), self._log)


def _record(plan: WheelPlan, wheel: Path, checked: Checked, seconds: float, jobs: int) -> WheelRecord:
    return WheelRecord(
        key=plan.parts.key,
        parts=plan.parts,
        file=wheel.name,
        digest=sha256_file(wheel),
        size_bytes=wheel.stat().st_size,
        sm=checked.architectures.sass,
        ptx=checked.architectures.ptx,
        libraries=checked.libraries,
        glibc=checked.glibc,
        imported=checked.imported,
        not_imported=dict(checked.not_imported),
        build_seconds=round(seconds, 1),
        jobs=jobs,
    )
