"""The CPU matrix over two nodes of two processes each, against the same on one such node, in turn.

The nodes are runners of this machine, so both share its cores: the ratio is that of all work, while on a cluster each
node has GPUs of its own. So the sums of seconds that each node's devices train are printed, too. With --slurm the
runners are steps of two virtual nodes. Without --python, the environment is installed from the lock first.

Exits 1 when the median of the pairs' ratios is above 1.5, or a case did not complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_matrix import ROOT, options_of, prepared, write_plan

LIMIT = 1.5
NODES = 2
Words = Sequence[str | Path]


@dataclass(frozen=True)
class Launcher:
    """How runners are started: by their words, or by Slurm.

    Attributes:
        prefix: of a command that runs on some nodes, whose number follows; empty without Slurm.
        environment: variables that it needs.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def commands(self, words: Words, nodes: int) -> list[Words]:
        """Return the commands that start a runner on each node."""
        if self.prefix:
            rank = ["bash", "-c", 'exec "$@" --node-rank "$SLURM_PROCID"', "bash"] if nodes > 1 else []
            return [[*self.prefix, str(nodes), *rank, *words]]
        return [[*words, "--node-rank", str(rank)] for rank in range(nodes)] if nodes > 1 else [words]


@dataclass(frozen=True)
class Ran:
    """A run: seconds until its first case starts, of all, of processors, and of the devices of each node.

    Those of processors are not known under Slurm, whose daemons started the runners.
    """

    first: float
    seconds: float
    processors: float
    by_node: tuple[float, ...]
    cases: int


def timed(launcher: Launcher, words: Words, out: Path, nodes: int) -> Ran:
    """Run a plan on so many nodes."""
    environment = {**os.environ, **(launcher.environment or {})}
    began, used = time.perf_counter(), processor_seconds()
    with contextlib.ExitStack() as logs:
        running = []
        for number, command in enumerate(launcher.commands([*words, "--out", out], nodes)):
            log = logs.enter_context(out.with_suffix(f".{number}.log").open("wb"))
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        statuses = [process.wait() for process in running]
    seconds, used = time.perf_counter() - began, processor_seconds() - used
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    cases = [line for line in lines if line["type"] == "case"]
    if any(statuses) or any(line["status"] != "completed" for line in cases):
        raise SystemExit(f"a run failed; its logs were {out.name}.*.log in {out.parent}")
    by_node: Counter[int] = Counter()
    for line in cases:
        for node in line["nodes"]:
            by_node[node] += line["seconds"] * len(line["devices"]) / len(line["nodes"])
    first = min(line["started_seconds"] for line in cases)
    return Ran(first, seconds, used, tuple(by_node[node] for node in range(nodes)), len(cases))


def processor_seconds() -> float:
    """Return the user and system seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def launcher(slurm: bool) -> Iterator[Launcher]:
    """Start Slurm with virtual nodes where it is asked for."""
    if not slurm:
        yield Launcher()
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.slurm_cluster import slurm_cluster, slurm_programs

    with tempfile.TemporaryDirectory(prefix="envbuild-slurm-") as name:
        folder = Path(name)
        with slurm_cluster(slurm_programs(folder / "programs"), folder / "cluster", nodes=NODES) as cluster:
            own = {**cluster.programs.environment, "SLURM_CONF": f"{cluster.folder}/slurm.conf"}
            yield Launcher(("srun", "--mpi=none", "--exclusive", "--ntasks-per-node=1", "--nodes"), own)


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="the most that a case has on a node")
    parser.add_argument("--slurm", action="store_true", help="start the runners by Slurm")
    options = parser.parse_args()
    ran: dict[int, list[Ran]] = {1: [], NODES: []}
    with prepared(options.python, options.matrix) as bench, launcher(options.slurm) as started:
        token = bench.work / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        base = bench.run[: bench.run.index("--plan")]
        together = ["--nodes", str(NODES), "--head", "127.0.0.1:0", "--token-file", token]
        for nodes in ran:
            write_plan(bench.work / f"plan{nodes}.json", options.matrix, nodes=nodes, processes=options.processes)
        for pair in range(options.pairs):
            for nodes, runs in ran.items():
                words = [*base, "--plan", bench.work / f"plan{nodes}.json", *(together if nodes > 1 else [])]
                runs.append(timed(started, words, bench.work / f"out{nodes}-{pair}", nodes))
    print(f"{options.matrix} on the CPU, {options.processes} processes a node, {options.pairs} pairs of runs in turn")
    for nodes, runs in ran.items():
        shown = ", ".join(f"{run.seconds:.1f}" for run in runs)
        first = statistics.median(run.first for run in runs)
        by_node = [statistics.median(values) for values in zip(*(run.by_node for run in runs), strict=True)]
        sums = ", ".join(f"{value:.1f}" for value in by_node)
        median, used = (statistics.median(getattr(run, name) for run in runs) for name in ("seconds", "processors"))
        print(f"{nodes} node{'s' if nodes > 1 else ' '} {median:6.1f} s ({shown})")
        print(f"         {runs[0].cases} runs of cases, the first after {first:.1f} s; {used:.0f} s of processors")
        print(f"         seconds of cases' processes, by node: {sums}")
    ratios = [two.seconds / one.seconds for one, two in zip(*ran.values(), strict=True)]
    ratio = statistics.median(ratios)
    print(f"ratio    {ratio:5.2f} ({', '.join(f'{value:.2f}' for value in ratios)}; at most {LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
