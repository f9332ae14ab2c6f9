"""What building for one architecture saves over a package's own list, and how busy the cores are.

For each package two builds of the same sources, against the same environment, on the same machine: through envbuild for
the target's SMs, and as its users build it (its own list of architectures, MAX_JOBS, nothing before nvcc). Compared are
processor seconds of all processes, and the wheels' sizes. Then all packages are built together behind the queue of
`envbuild wheels`: how busy the cores were, the most memory at a time, and how long it takes to find everything built.

`--parts` measures one of these alone (one, stock, together), for machines with many cores where they may run beside
each other on cores of their own; `--compare` reads what several such runs have written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.core.progress import PlainReporter
from envbuild.lock.lockfile import read_lock
from envbuild.lock.uv.program import uv_program
from envbuild.store.local import LocalStore
from envbuild.sync.build_environment import build_environment
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.elf import read_wheel
from envbuild.wheels.build.compiler_wrappers import Tokens
from envbuild.wheels.build.limits import GIB, choose_limits
from envbuild.wheels.build.parallel import BuildContext, make_wheels
from envbuild.wheels.build.unpack import unpack
from envbuild.wheels.build.wheel import WheelWorkspace, build_wheel
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.plan import WheelPlan, cuda_of, plan_wheels
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolchain import find_toolchain

RATIO_LIMIT = 4.0
BUSY_LIMIT = 0.9
AGAIN_LIMIT_SECONDS = 3.0
PARTS = ("one", "stock", "together")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Measured:
    """Wall and processor seconds, and the most memory that this process's children had at a time."""

    cores: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    peak_gib: float = 0.0
    load: float = 0.0
    held: list[int] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """The share of all cores' time that was used."""
        return self.cpu / (self.wall * self.cores)

    @property
    def turns(self) -> float:
        """How many compilers had a turn, on average: what the queue gives out, however busy others keep the machine."""
        return sum(self.held) / max(1, len(self.held))

    def told(self) -> dict[str, float]:
        names = ("wall", "cpu", "peak_gib", "busy", "turns", "load")
        return {"cores": self.cores, **{name: round(float(getattr(self, name)), 3) for name in names}}


@contextlib.contextmanager
def measuring(turns: Path | None = None) -> Iterator[Measured]:
    """Measures the block; the numbers are there when it is over.

    Args:
        turns: where the folders of queues are.
    """
    measured = Measured(cores=len(os.sched_getaffinity(0)))
    over = threading.Event()

    def watch() -> None:
        loads = []
        while not over.wait(0.5):
            measured.peak_gib = max(measured.peak_gib, _memory_of_children() / GIB)
            loads.append(os.getloadavg()[0])
            measured.load = sum(loads) / len(loads)
            if turns is not None:
                measured.held.append(_turns_held(turns))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began, spent = time.monotonic(), _children()
    yield measured
    measured.wall, measured.cpu = time.monotonic() - began, _children() - spent
    over.set()
    watcher.join()


def _turns_held(folder: Path) -> int:
    """The turns that compilers have right now (proc(5): locks)."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    locked = {words[5].rpartition(":")[2] for words in lines if words[1] != "->"}
    return sum(str(core.stat().st_ino) in locked for core in folder.glob("compilers-*/core-*"))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_of_children() -> int:
    """Resident bytes of all processes below this one (proc(5): statm, stat)."""
    parents, sizes = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(stat[1])
                sizes[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * PAGE
            except (OSError, IndexError):
                continue
    total, below = 0, {os.getpid()}
    while below:
        below = {number for number, parent in parents.items() if parent in below}
        total += sum(sizes[number] for number in below)
    return total


class Shop:
    """The lock, its environment and its plans, and a folder to build in."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.work = work
        lock = read_lock(data_root() / "lockfiles" / arguments.stack / arguments.base)
        catalog = Catalog.open(Path.cwd())
        site, target = load_site(), catalog.target(arguments.target)
        reporter = PlainReporter()
        cache = Path(arguments.cache or work / "cache")
        store = LocalStore(cache, reporter)
        sources = WheelSources(base=catalog.base(arguments.base), site=site, store=store, reporter=reporter)
        self.toolchain = find_toolchain(cuda_of(lock, target))
        self.plans = plan_wheels(lock, arguments.package, target, catalog, self.toolchain, sources)
        self.limits = choose_limits(arguments.jobs, arguments.memory)
        self.environment = (
            Path(arguments.environment) if arguments.environment else build_environment(lock, site, store, reporter)
        )
        self.sources = sources
        self.reporter = reporter

    def one(self, plan: WheelPlan) -> dict[str, Any]:
        """Through envbuild, for the target's SMs."""
        turns = self.work / "turns"
        turns.mkdir(exist_ok=True)
        bench = WheelWorkspace(
            environment=self.environment,
            toolchain=self.toolchain,
            folder=self.work / f"one-{plan.parts.package}",
            log=self.work / f"one-{plan.parts.package}.log",
            tokens=Tokens(
                folder=turns, limits=self.limits, job_memory_gib=self.limits.share(plan.recipe.job_memory_gib)
            ),
        )
        archive = self.sources.archive(plan.origin)
        with measuring() as measured:
            wheel = build_wheel(plan, archive, bench, self.reporter.update)
        return _result(wheel, measured)

    def stock(self, plan: WheelPlan) -> dict[str, Any]:
        """As users build it, with its own list of architectures."""
        folder = self.work / f"stock-{plan.parts.package}"
        source = unpack(plan.name, self.sources.archive(plan.origin), folder / "source")
        home = self.toolchain.home
        # What makes it compile at all, instead of taking a wheel of somebody else's.
        forced = {name: value for name, value in plan.parts.variables.items() if name.endswith("FORCE_BUILD")}
        environment = {
            **forced,
            "PATH": f"{self.environment}/bin:{home}/bin:{os.environ['PATH']}",
            "HOME": str(folder),
            "CUDA_HOME": str(home),
            "MAX_JOBS": str(self.limits.jobs),
        }
        command = [uv_program(), "build", "--wheel", "--no-build-isolation", "--no-config", "--offline"]
        command += ["--python", self.environment / "bin/python", "--out-dir", folder / "out", source]
        with (self.work / f"stock-{plan.parts.package}.log").open("w") as log, measuring() as measured:
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        return _result(next((folder / "out").glob("*.whl")), measured)

    def together(self) -> dict[str, Any]:
        """All of them by the queue, checked and kept; then once more, when nothing is to be built."""
        store = LocalStore(self.work / "together", self.reporter)
        context = BuildContext(
            toolchain=lambda: self.toolchain,
            sources=self.sources,
            wheelhouse=Wheelhouse(store),
            limits=self.limits,
        )
        with measuring(store.root / "staging") as measured:
            made = make_wheels(self.plans, lambda: self.environment, context)
        kept = self.work / "wheels"
        kept.mkdir(exist_ok=True)
        for item in made:
            shutil.copy2(item.wheel, kept)
        with measuring() as again:
            found = make_wheels(self.plans, lambda: self.environment, context)
        return {
            **measured.told(),
            "memory_gib": self.limits.memory_gib,
            "wheels": [item.record.model_dump(mode="json", by_alias=True) for item in made],
            "again": {**again.told(), "built": sum(item.built for item in found)},
        }


def _result(wheel: Path, measured: Measured) -> dict[str, Any]:
    found = sum((item.architectures for item in read_wheel(wheel)), Architectures())
    return {**measured.told(), "bytes": wheel.stat().st_size, "contains": found.text()}


def show(results: dict[str, Any]) -> bool:
    """Print ratios and limits; returns whether all hold."""
    good = True
    for package in sorted(set(results.get("one", {})) & set(results.get("stock", {}))):
        one, stock = results["one"][package], results["stock"][package]
        print(f"{package}: {one['contains']}, against {stock['contains']}")
        for name, what in (("cpu", "processor seconds"), ("bytes", "size of the wheel")):
            ratio = stock[name] / one[name]
            good &= ratio >= RATIO_LIMIT
            print(f"  {what}: {stock[name]:.0f} / {one[name]:.0f} = {ratio:.1f} (at least {RATIO_LIMIT:g})")
    if together := results.get("together"):
        fits = together["peak_gib"] <= together["memory_gib"]
        good &= together["busy"] >= BUSY_LIMIT and fits and together["again"]["wall"] <= AGAIN_LIMIT_SECONDS
        print(
            f"together: {together['wall']:.0f} s on {together['cores']} cores, busy {together['busy']:.2f} of the time"
        )
        print(
            f"  at least {BUSY_LIMIT:g}; at most {together['peak_gib']:.1f} of {together['memory_gib']} GiB at a time"
        )
        if "turns" in together:
            print(f"  compilers at once: {together['turns']:.2f}; the machine's load: {together['load']:.1f}")
        print(f"  once more: {together['again']['wall']:.1f} s (at most {AGAIN_LIMIT_SECONDS:g}), nothing built")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", default="nemo-2.7")
    parser.add_argument("--base", default="ubuntu2204-cu130")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--package", action="append", help="may be repeated; default: causal-conv1d")
    parser.add_argument("--parts", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--memory", type=int, help="GiB")
    parser.add_argument("--environment", help="a virtual environment with phase main, instead of making one")
    parser.add_argument("--cache", help="a cache directory to take sdists and the environment from")
    parser.add_argument("--work", type=Path, help="build here, and keep it")
    parser.add_argument("--out", type=Path, help="write the measurements to this file")
    parser.add_argument("--compare", type=Path, nargs="+", help="show what these files have; build nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if arguments.compare:
        for file in arguments.compare:
            for part, value in json.loads(file.read_text()).items():
                results.setdefault(part, {}).update(value)
        return 0 if show(results) else 1
    arguments.package = arguments.package or ["causal-conv1d"]
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        shop = Shop(arguments, work)
        for part in arguments.parts or PARTS:
            if part == "together":
                results[part] = shop.together()
                continue
            for plan in shop.plans:
                results.setdefault(part, {})[plan.parts.package] = getattr(shop, part)(plan)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if show(results) else 1


if __name__ == "__main__":
    sys.exit(main())
