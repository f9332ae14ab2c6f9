"""How well cases are packed: recorded durations, replayed through the runner's own scheduler in simulated time.

For 1 to 64 devices the makespan is set against the larger of (device-seconds / devices) and the longest case (ratio);
and against what no order can beat (to the reachable), which knows that cases wait for their baselines' weights. Cases
that need more devices than there are, are left out. The scheduler knows no durations. On 3 and 6 devices, which few
machines have, wide cases wait for all narrow ones and it takes up to 1.29 times the best. The mixes:

- each file of benchmarks/data/packing-*.json: what cases of a real run took (record one with --record);
- certify-full on GPUs: its cases, with the durations that GPT cases had on two H200s, a process for every case
  (10 to 16 s until the first step, then 0.07 to 0.23 s a step), and the same with ranks that stay alive (a start of
  0.6 to 1.5 s is assumed there, for want of a record).

Exits 1 when a makespan of cases on GPUs is more than 1.15 times the reachable; where it is more than 1.15 times the
simpler bound, the row is marked.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand

# The runner is data of envbuild, and installed nowhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "smoke"))

from envbuild_smoke.run.scheduler import Job, Scheduler

LIMIT = 1.15
DEVICES = (1, 2, 4, 8, 16, 32, 64)
DATA = Path(__file__).parent / "data"
ON_CPUS = "packing-certify-full-cpu.json"
# Seconds until the first step, and of a step, of the axis that costs most: measured on two H200s.
START_SECONDS = {"plain": 10.0, "sequence": 12.0, "context": 15.0}
STEP_SECONDS = {"plain": 0.14, "data": 0.07, "tensor": 0.15, "pipeline": 0.09, "sequence": 0.23, "context": 0.20}
BASELINE_START_SECONDS = 16.0
# Of a comparison of weights: one rank loads two checkpoints.
COMPARE_SECONDS = 3.0
# Of a start, what is left when Python, torch and CUDA are there already.
LIVE_SHARE = 0.1


@dataclass(frozen=True)
class Timed:
    """A job, how long it really takes, and when after its start its weights are saved (a baseline)."""

    job: Job
    seconds: float
    weights_seconds: float | None = None


def makespan(jobs: Sequence[Timed], devices: int) -> float:
    """How long all jobs take when the scheduler decides."""
    by_key = {timed.job.key: timed for timed in jobs}
    scheduler = Scheduler([timed.job for timed in jobs], range(devices))
    events: list[tuple[float, int, str]] = []
    now = 0.0
    while not scheduler.done:
        for start in scheduler.start():
            timed = by_key[start.job.key]
            heapq.heappush(events, (now + timed.seconds, 1, start.job.key))
            if timed.weights_seconds is not None:
                heapq.heappush(events, (now + timed.weights_seconds, 0, start.job.key))
        now, ends, key = heapq.heappop(events)
        (scheduler.ended if ends else scheduler.weights_saved)(key)
    return now


def simple_bound(jobs: Sequence[Timed], devices: int) -> float:
    """The larger of device-seconds / devices and the longest case."""
    return max(area(jobs) / devices, *(timed.seconds for timed in jobs))


def area(jobs: Sequence[Timed]) -> float:
    """Device-seconds of all jobs."""
    return sum(timed.seconds * timed.job.world_size for timed in jobs)


def reachable_bound(jobs: Sequence[Timed], devices: int) -> float:
    """The largest of what no order of the jobs can beat.

    Beside the simple bound: the longest chain of jobs that wait for each other; that until the first weights are
    saved nothing runs but what waits for none; and that of the jobs wider than a part of the devices only so many run
    side by side.
    """
    by_key = {timed.job.key: timed for timed in jobs}

    def ready(timed: Timed) -> float:
        if timed.job.weights_of is None:
            return 0.0
        baseline = by_key[timed.job.weights_of]
        saved = None if timed.job.needs_final_weights else baseline.weights_seconds
        return ready(baseline) + (baseline.seconds if saved is None else saved)

    chains = [ready(timed) + timed.seconds for timed in jobs]
    first = min((moment for timed in jobs if (moment := ready(timed)) > 0), default=0.0)
    early = sum(min(timed.seconds, first) * timed.job.world_size for timed in jobs if ready(timed) == 0)
    later = first + (area(jobs) - min(early, first * devices)) / devices
    beside = [
        sum(timed.seconds for timed in jobs if timed.job.world_size * (count + 1) > devices) / count
        for count in range(1, 9)
    ]
    return max(simple_bound(jobs, devices), later, *chains, *beside)


def certify_full(start_share: float) -> list[Timed]:
    """The cases of certify-full for H200, with durations of GPT cases on two of them."""
    matrix = Catalog.open(Path(__file__).resolve().parents[1]).matrix("certify-full")
    packages = frozenset({"transformer-engine", "flash-attn", "mamba-ssm", "causal-conv1d"})
    cases = expand(matrix, "certify-full", Capabilities(device=Device.CUDA, sm=("90a",), packages=packages))
    jobs = []
    for case in cases:
        start, step = start_and_step(case)
        seconds = start * start_share + step * matrix.training.steps * (2 if case.resume_at else 1)
        seconds += COMPARE_SECONDS * start_share if case.compare_weights else 0
        job = Job(
            key=case.id,
            world_size=case.slots,
            weights_of=case.compared_with,
            needs_final_weights=case.compare_weights,
        )
        jobs.append(Timed(job, seconds, start * start_share if case.is_baseline else None))
    return jobs


def start_and_step(case: Case) -> tuple[float, float]:
    layout = case.layout
    used = ["plain"] + [axis for axis in ("data", "tensor", "pipeline", "context") if getattr(layout, axis) > 1]
    if layout.sequence:
        used.append("sequence")
    start = max(START_SECONDS.get(axis, 0.0) for axis in used)
    step = max(STEP_SECONDS[axis] for axis in used if axis != "plain" or len(used) == 1)
    return (BASELINE_START_SECONDS if case.is_baseline else start), step


def recorded(file: Path) -> list[Timed]:
    return [
        Timed(
            Job(
                key=entry["key"],
                world_size=entry["world_size"],
                weights_of=entry["weights_of"],
                needs_final_weights=entry["needs_final_weights"],
            ),
            entry["seconds"],
            entry["weights_seconds"],
        )
        for entry in json.loads(file.read_text(encoding="utf-8"))["jobs"]
    ]


def record(results: Path, plan: Path, note: str) -> dict[str, object]:
    """What the cases of a run took, as a file of benchmarks/data has it."""
    cases = {case["id"]: case for case in json.loads(plan.read_text(encoding="utf-8"))["cases"]}
    entries = []
    for text in results.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["type"] != "case" or line["status"] != "completed":
            continue
        case = cases[line["case"]]
        # A baseline saves its weights before its first step.
        weights = line["startup_seconds"] if case["baseline"] is None else None
        entries.append(
            {
                "key": f"{line['case']} {line['repeat']}",
                "world_size": case["world_size"],
                "seconds": line["seconds"],
                "weights_seconds": weights,
                "weights_of": None if case["baseline"] is None else f"{case['baseline']} {line['repeat']}",
                "needs_final_weights": case["compare_weights"],
            }
        )
    return {"note": note, "jobs": entries}


def show(name: str, jobs: Sequence[Timed]) -> float:
    """Print a line for each number of devices; return the largest ratio."""
    print(f"{name}: {len(jobs)} jobs")
    print("devices  jobs  makespan    area  longest   ratio   to the reachable")
    worst = 0.0
    for devices in DEVICES:
        too_large = {timed.job.key for timed in jobs if timed.job.world_size > devices}
        possible = [timed for timed in jobs if timed.job.key not in too_large]
        taken = makespan(possible, devices)
        simple = simple_bound(possible, devices)
        longest = max(timed.seconds for timed in possible)
        reachable = taken / reachable_bound(possible, devices)
        worst = max(worst, reachable)
        print(
            f"{devices:7}  {len(possible):4}  {taken:8.1f} {area(possible) / devices:7.1f}  {longest:7.1f}  "
            f"{taken / simple:6.3f}  {reachable:6.3f}{'  *' if taken / simple > LIMIT else ''}"
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs=3, metavar=("RESULTS", "PLAN", "NOTE"), help="print a file for data/")
    options = parser.parse_args()
    if options.record:
        results, plan, note = options.record
        print(json.dumps(record(Path(results), Path(plan), note), indent=1))
        return 0
    mixes: list[tuple[str, Callable[[], list[Timed]]]] = [
        (file.name, lambda file=file: recorded(file)) for file in sorted(DATA.glob("packing-*.json"))
    ]
    mixes.append(("certify-full, a process for every case", lambda: certify_full(1.0)))
    mixes.append(("certify-full, ranks that stay alive", lambda: certify_full(LIVE_SHARE)))
    ratios = {name: show(name, make()) for name, make in mixes}
    worst = max(ratio for name, ratio in ratios.items() if name != ON_CPUS)
    print(f"largest ratio to the reachable {worst:.3f} (at most {LIMIT:g}); * more than that to the simpler bound")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
