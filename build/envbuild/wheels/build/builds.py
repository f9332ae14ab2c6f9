"""Builds the wheels that are not in the wheelhouse yet, all at once behind one queue, checks them, and keeps them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_file, short
from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore
from envbuild.wheels.build.compiler_wrappers import Tokens
from envbuild.wheels.build.limits import Limits
from envbuild.wheels.build.wheel import WheelWorkspace, build_wheel
from envbuild.wheels.cache.entry import BUILDS_KIND
from envbuild.wheels.cache.wheelhouse import Built, Wheelhouse, WheelRecord, fill
from envbuild.wheels.plan import WheelPlan
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolchain import Toolchain, refuse_unknown_sm

if TYPE_CHECKING:
    from envbuild.wheels.audit.audit import AuditedWheel

# What no path in CC, CPATH, -ffile-prefix-map, a Makefile or a build.ninja may have.
_SPLITS = re.compile(r"[^\w/.+@~-]")


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all builds of a call share.

    Attributes:
        toolchain: gives the compilers; asked for only when something is built.
        wheelhouse: the store's, with what is beside it.
    """

    toolchain: Callable[[], Toolchain]
    sources: WheelSources
    wheelhouse: Wheelhouse
    store: LocalStore
    reporter: Reporter
    limits: Limits


def make_wheels(plans: Sequence[WheelPlan], environment: Callable[[], Path], workshop: Workshop) -> tuple[Built, ...]:
    """The wheels of ``plans``; what is in the wheelhouse is taken from there, the rest is built at the same time.

    Args:
        environment: gives the virtual environment with the lock's phase main; asked for only when something is built.

    Raises:
        BuildError: a wheel does not build; the others are built to their end and kept.
        CheckRefusedError: a wheel is not what was asked for, and was not kept.
    """
    wheelhouse = workshop.wheelhouse
    found = {plan.parts.key: wheelhouse.find(plan.parts.key) for plan in plans}
    missing = [plan for plan in plans if found[plan.parts.key] is None]
    made = _build_all(missing, environment, workshop) if missing else {}
    return tuple(made.get(plan.parts.key) or _there(found[plan.parts.key]) for plan in plans)


def _there(item: Built | None) -> Built:
    if item is None:
        raise KeyError("a plan is neither found nor made")
    return item


def _build_all(plans: Sequence[WheelPlan], made: Callable[[], Path], workshop: Workshop) -> dict[str, Built]:
    _refuse_path(workshop.store.root)
    limits, toolchain = workshop.limits, workshop.toolchain()
    refuse_unknown_sm(toolchain, dict.fromkeys(sm for plan in plans for sm in plan.expected.sass))
    environment = made()
    which = plans[0].name if len(plans) == 1 else f"{len(plans)} wheels"
    most = max(limits.jobs_for(plan.recipe.job_memory_gib) for plan in plans)
    title = f"build {which} for {plans[0].asked.text()}, {most} at once in {limits.memory_gib} GiB"
    board = _Board(workshop.reporter)
    with workshop.store.staging("compilers") as turns, workshop.reporter.step(title):
        pool = ThreadPoolExecutor(len(plans))
        with interruptible(pool):
            running: dict[str, Future[Built]] = {}
            for plan in plans:
                maker = _Maker(plan, environment, toolchain, workshop, turns, board)
                running[plan.parts.key] = pool.submit(_kept, maker, plan, workshop)
            # All of them, before the first error is raised.
            failures = [future.exception() for future in running.values()]
        for failure in failures:
            if failure is not None:
                raise failure
    return {key: future.result() for key, future in running.items()}


def _refuse_path(root: Path) -> None:
    """Refuse a place whose path build tools take apart: setuptools splits CC, ninja and make split commands."""
    bad = sorted(set(_SPLITS.findall(str(root.absolute()))))
    if bad:
        words = " and ".join("a space" if one == " " else repr(one) for one in bad)
        raise MachineError(
            f"wheels cannot be compiled in the cache directory {root}",
            why=f"Its path has {words} in it, at which build tools (setuptools, ninja, make) split their commands.",
            fix="Point ENVBUILD_CACHE_DIR at a directory without. What needs no compiler works here, too.",
        )


def _kept(maker: _Maker, plan: WheelPlan, workshop: Workshop) -> Built:
    try:
        return workshop.wheelhouse.get_or_build(plan.parts.key, maker)
    except EnvbuildError as error:
        workshop.reporter.note(f"{plan.name}: {error.what}")
        raise
    finally:
        maker.leave()


class _Board:
    """What is going on in several builds, as one line."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}

    def told(self, name: str, text: str) -> None:
        """A build is at ``text`` now; nothing when it is over."""
        with self._lock:
            self._texts[name] = text
            shown = [f"{package}: {doing}" for package, doing in self._texts.items() if doing]
            self._reporter.update("; ".join(shown))


class _Maker:
    """Fills the entry of one wheel."""

    def __init__(
        self,
        plan: WheelPlan,
        environment: Path,
        toolchain: Toolchain,
        workshop: Workshop,
        turns: Path,
        board: _Board,
    ) -> None:
        self._plan = plan
        self._environment = environment
        self._toolchain = toolchain
        self._workshop = workshop
        self._turns = turns
        self._board = board

    def __call__(self, entry: Path) -> None:
        plan, store = self._plan, self._workshop.store
        folder = store.path_of(BUILDS_KIND, plan.parts.key)
        log = store.root / "logs" / "wheels" / f"{plan.parts.package}-{short(plan.parts.key)}.log"
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(log)
        limits = self._workshop.limits
        turns = Tokens(folder=self._turns, limits=limits, takes=limits.share(plan.recipe.job_memory_gib))
        bench = WheelWorkspace(
            environment=self._environment, toolchain=self._toolchain, folder=folder, log=log, turns=turns
        )
        from envbuild.wheels.audit.audit import check_wheel  # pyelftools and auditwheel: only where wheels are built

        self._tell("unpacking")
        archive = self._workshop.sources.archive(plan.origin)
        started = time.monotonic()
        wheel = build_wheel(plan, archive, bench, self._tell)
        seconds = time.monotonic() - started
        self._tell(f"checking {wheel.name}")
        checked = check_wheel(wheel, plan, self._environment, folder / "unpacked", log)
        fill(entry, checked.wheel, _record(plan, checked, seconds, limits.jobs_for(plan.recipe.job_memory_gib)), log)
        with machine_errors(folder):
            remove_tree(folder)
        self._workshop.reporter.note(f"{plan.name}: built and checked in {time.monotonic() - started:.0f} s")

    def leave(self) -> None:
        """The build is over, one way or another."""
        self._tell("")

    def _tell(self, text: str) -> None:
        self._board.told(self._plan.parts.package, text)


def _record(plan: WheelPlan, checked: AuditedWheel, seconds: float, jobs: int) -> WheelRecord:
    wheel = checked.wheel
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
        libstdcxx=checked.libstdcxx,
        policy=checked.tag.policy,
        not_manylinux=checked.tag.against,
        imported=checked.imported,
        not_imported=dict(checked.not_imported),
        build_seconds=round(seconds, 1),
        jobs=jobs,
    )
