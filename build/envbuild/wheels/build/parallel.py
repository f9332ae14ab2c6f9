"""Builds the wheels that are not in the wheelhouse yet, in parallel with shared limits, checks them, and keeps them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
from envbuild.wheels.build.fixed_paths import are_possible
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
class BuildContext:
    """What all builds of a call share.

    Attributes:
        toolchain: gives the compilers; asked for only when something is built.
        wheelhouse: the store's, with its remote stores.
    """

    toolchain: Callable[[], Toolchain]
    sources: WheelSources
    wheelhouse: Wheelhouse
    limits: Limits

    @property
    def store(self) -> LocalStore:
        return self.sources.store

    @property
    def reporter(self) -> Reporter:
        return self.sources.reporter


def make_wheels(
    plans: Sequence[WheelPlan], environment: Callable[[], Path], context: BuildContext
) -> tuple[Built, ...]:
    """The wheels of ``plans``; what is in the wheelhouse is taken from there, the rest is built at the same time.

    Args:
        environment: gives the virtual environment with the lock's phase main; asked for only when something is built.

    Raises:
        BuildError: a wheel does not build; the others are built to their end and kept.
        CheckRefusedError: a wheel is not what was asked for, and was not kept.
    """
    wheelhouse = context.wheelhouse
    kept = {plan.parts.key: wheelhouse.find(plan.parts.key) for plan in plans}
    missing = [plan for plan in plans if kept[plan.parts.key] is None]
    made = _build_all(missing, environment, context) if missing else {}
    have = made | {key: built for key, built in kept.items() if built is not None}
    return tuple(have[plan.parts.key] for plan in plans)


def _build_all(plans: Sequence[WheelPlan], prepare: Callable[[], Path], context: BuildContext) -> dict[str, Built]:
    _refuse_path(context.store.root)
    if not are_possible():
        context.reporter.note(
            "note: this machine gives a process no mount namespace, so the bytes of these wheels depend on the path of "
            "the cache directory"
        )
    limits, toolchain = context.limits, context.toolchain()
    refuse_unknown_sm(toolchain, dict.fromkeys(sm for plan in plans for sm in plan.expected.sass))
    environment = prepare()
    which = plans[0].name if len(plans) == 1 else f"{len(plans)} wheels"
    most = max(limits.jobs_for(plan.recipe.job_memory_gib) for plan in plans)
    title = f"build {which} for {plans[0].asked.text()}, {most} at once in {limits.memory_gib} GiB"
    progress = _Progress(context.reporter)
    with context.store.staging("compilers") as tokens, context.reporter.step(title):
        # A thread for each package: the tokens limit the compilers, whichever package they are of.
        with interruptible(len(plans)) as pool:
            running: dict[str, Future[Built]] = {}
            for plan in plans:
                build = _WheelBuild(plan, environment, toolchain, context, tokens, progress)
                running[plan.parts.key] = pool.submit(build.run)
            # All of them, before the first error is raised.
            failures = [future.exception() for future in running.values()]
        for failure in failures:
            if failure is not None:
                raise failure
    return {key: future.result() for key, future in running.items()}


def _refuse_path(root: Path) -> None:
    """Refuse a folder whose path build tools take apart: setuptools splits CC, ninja and make split commands."""
    bad = sorted(set(_SPLITS.findall(str(root.absolute()))))
    if bad:
        words = " and ".join("a space" if one == " " else repr(one) for one in bad)
        raise MachineError(
            f"wheels cannot be compiled in the cache directory {root}",
            why=f"Its path has {words} in it, at which build tools (setuptools, ninja, make) split their commands.",
            fix="Point ENVBUILD_CACHE_DIR at a directory without. What needs no compiler works here, too.",
        )


class _Progress:
    """The progress of several builds, as one line."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}

    def update(self, name: str, text: str) -> None:
        """Show what a build is doing; nothing when it is over."""
        with self._lock:
            self._texts[name] = text
            shown = [f"{package}: {doing}" for package, doing in self._texts.items() if doing]
            self._reporter.update("; ".join(shown))


@dataclass(frozen=True)
class _WheelBuild:
    """The build of one wheel; called, it fills the wheel's entry."""

    plan: WheelPlan
    environment: Path
    toolchain: Toolchain
    context: BuildContext
    tokens: Path
    progress: _Progress

    def run(self) -> Built:
        try:
            return self.context.wheelhouse.get_or_build(self.plan.parts.key, self)
        except EnvbuildError as error:
            self.context.reporter.note(f"{self.plan.name}: {error.what}")
            raise
        finally:
            self._show("")

    def __call__(self, entry: Path) -> None:
        plan, store = self.plan, self.context.store
        folder = store.path_of(BUILDS_KIND, plan.parts.key)
        log = store.root / "logs" / "wheels" / f"{plan.parts.package}-{short(plan.parts.key)}.log"
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(log)
        limits = self.context.limits
        tokens = Tokens(folder=self.tokens, limits=limits, job_memory_gib=limits.share(plan.recipe.job_memory_gib))
        workspace = WheelWorkspace(
            environment=self.environment, toolchain=self.toolchain, folder=folder, log=log, tokens=tokens
        )
        from envbuild.wheels.audit.audit import check_wheel  # pyelftools and auditwheel: only where wheels are built

        self._show("unpacking")
        archive = self.context.sources.archive(plan.origin)
        started = time.monotonic()
        wheel = build_wheel(plan, archive, workspace, self._show)
        seconds = time.monotonic() - started
        self._show(f"checking {wheel.name}")
        checked = check_wheel(wheel, plan, self.environment, folder / "unpacked", log)
        fill(entry, checked.wheel, _record(plan, checked, seconds, limits.jobs_for(plan.recipe.job_memory_gib)), log)
        with machine_errors(folder):
            remove_tree(folder)
        self.context.reporter.note(f"{plan.name}: built and checked in {time.monotonic() - started:.0f} s")

    def _show(self, text: str) -> None:
        self.progress.update(self.plan.parts.package, text)


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
