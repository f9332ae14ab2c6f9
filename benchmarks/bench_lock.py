"""What `envbuild lock` costs over a bare `uv lock` of the project that it generates, with the same caches.

Cold: every run has an empty uv cache and an empty store. Warm: all runs share one uv cache. In both, the lock is there
and is made again: every version is pinned for uv too. First: no lock is there, and uv gets the project without pins,
which are what is to be found out; caches are empty. The two take turns, so that both meet the same index and the same
machine; the ratio is the median of the pairs' ratios, with the smallest and the largest. Processor seconds are of all
processes of a run: a busy machine changes them less than the time. No-op: nothing changed.
`--all` locks every stack that can be locked from here, each of which is timed by itself in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tomlkit

ENVBUILD = [sys.executable, "-m", "envbuild"]
COLD_LIMIT = 1.15
WARM_LIMIT = 1.3
NO_OP_LIMIT_SECONDS = 1.0
ALL_LIMIT = 2.0
MEMORY_LIMIT_MIB = 1024


class Bench:
    """Runs envbuild and uv with caches of its own, below one folder."""

    def __init__(self, work: Path, stack: str, base: str) -> None:
        self.work = work
        self.project = work / "project"
        self.project.mkdir()
        self.arguments = ["lock", "--stack", stack, "--base", base]
        self.lock = self.project / "lockfiles" / stack / base
        self.uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"

    def envbuild(self, *more: str, cache: str, status: tuple[int, ...] = (0,)) -> Run:
        env = {
            **os.environ,
            "ENVBUILD_CACHE_DIR": str(self.work / f"{cache}-store"),
            "UV_CACHE_DIR": str(self.work / f"{cache}-uv"),
        }
        return timed([*ENVBUILD, *(more or self.arguments)], self.project, env, status)

    def bare(self, cache: str, *, pinned: bool = True) -> Run:
        """`uv lock` on a copy of the generated project."""
        folder = self.work / "bare"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        project = tomlkit.parse((self.lock / "pyproject.toml").read_text())
        if not pinned:
            del project["tool"]["uv"]["constraint-dependencies"]
        (folder / "pyproject.toml").write_text(tomlkit.dumps(project))
        env = {**os.environ, "UV_CACHE_DIR": str(self.work / f"{cache}-uv")}
        return timed([self.uv, "lock", "--preview-features", "minimum-libc-version"], folder, env, (0,))

    def forget(self, cache: str) -> None:
        for kind in ("store", "uv"):
            shutil.rmtree(self.work / f"{cache}-{kind}", ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """What a command took: wall time, and processor time of all its processes."""

    seconds: float
    cpu_seconds: float


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], cwd: Path, env: dict[str, str], statuses: tuple[int, ...]) -> Run:
    before, started = cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in statuses:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return Run(time.perf_counter() - started, cpu_seconds() - before)


def pairs(bench: Bench, count: int, kind: str) -> list[tuple[Run, Run]]:
    """(envbuild, uv) of each pair."""
    found = []
    for number in range(count):
        runs = {}
        # Who goes first changes: the second finds the index's own caches filled.
        order = ("envbuild", "uv") if number % 2 else ("uv", "envbuild")
        for who in order:
            cache = "warm" if kind == "warm" else f"cold-{who}"
            if kind != "warm":
                bench.forget(cache)
            if who == "uv":
                runs[who] = bench.bare(cache, pinned=kind != "first")
            elif kind == "first":
                out = bench.work / "first"
                shutil.rmtree(out, ignore_errors=True)
                runs[who] = bench.envbuild(*bench.arguments, "--out", str(out), cache=cache)
            else:
                runs[who] = bench.envbuild(*bench.arguments, "--upgrade", cache=cache)
        found.append((runs["envbuild"], runs["uv"]))
    return found


def show(title: str, measured: list[tuple[Run, Run]], limit: float) -> bool:
    ratios = [ours.seconds / peer.seconds for ours, peer in measured]
    ratio = statistics.median(ratios)
    runs = ", ".join(f"{ours.seconds:.1f}/{peer.seconds:.1f}" for ours, peer in measured)
    cpu = ", ".join(f"{ours.cpu_seconds:.1f}/{peer.cpu_seconds:.1f}" for ours, peer in measured)
    print(f"{title:5} envbuild lock / uv lock: {ratio:.2f}, {min(ratios):.2f} to {max(ratios):.2f} (at most {limit:g})")
    print(f"      seconds {runs}; processor seconds {cpu}")
    return ratio <= limit


def everything(bench: Bench) -> bool:
    """`lock --all` against the slowest of the locks that it makes, all with the same warm caches."""
    bench.envbuild("lock", "--all", "--json", cache="warm", status=(0, 3, 4, 5, 10))
    made = sorted(path.parent for path in (bench.project / "lockfiles").glob("*/*/stack.lock.toml"))
    singles = {}
    for path in made:
        words = ["lock", "--stack", path.parent.name, "--base", path.name, "--upgrade"]
        singles[f"{path.parent.name}/{path.name}"] = bench.envbuild(*words, cache="warm").seconds
    together = bench.envbuild("lock", "--all", "--upgrade", cache="warm", status=(0, 3, 4, 5, 10)).seconds
    slowest = max(singles, key=lambda name: singles[name])
    ratio = together / singles[slowest]
    print(
        f"lock --all: {len(singles)} locks in {together:.1f} s; the slowest alone, {slowest}, {singles[slowest]:.1f} s"
    )
    print(f"ratio {ratio:.2f} (at most {ALL_LIMIT:g})")
    print(json.dumps({name: round(seconds, 1) for name, seconds in singles.items()}))
    return ratio <= ALL_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", default="nemo-2.7")
    parser.add_argument("--base", default="ubuntu2204-cu130")
    parser.add_argument("--cold", type=int, default=2, help="pairs with empty caches")
    parser.add_argument("--first", type=int, default=2, help="pairs with empty caches where no lock is there")
    parser.add_argument("--warm", type=int, default=5, help="pairs with one cache")
    parser.add_argument("--all", action="store_true", help="measure `lock --all` too (minutes)")
    options = parser.parse_args()
    held = []
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-") as name:
        bench = Bench(Path(name), options.stack, options.base)
        bench.envbuild(cache="warm")
        if options.warm:
            held.append(show("warm", pairs(bench, options.warm, "warm"), WARM_LIMIT))
        for words in ([], ["--check"]):
            seconds = min(bench.envbuild(*bench.arguments, *words, cache="warm").seconds for _ in range(5))
            title = " ".join(["lock", *words])
            print(f"{title}, nothing changed: {seconds:.2f} s (at most {NO_OP_LIMIT_SECONDS:g})")
            held.append(seconds <= NO_OP_LIMIT_SECONDS)
        if options.cold:
            held.append(show("cold", pairs(bench, options.cold, "cold"), COLD_LIMIT))
        if options.first:
            held.append(show("first", pairs(bench, options.first, "first"), COLD_LIMIT))
        if options.all:
            held.append(everything(bench))
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest process: {memory:.0f} MiB (at most {MEMORY_LIMIT_MIB})")
    held.append(memory <= MEMORY_LIMIT_MIB)
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
