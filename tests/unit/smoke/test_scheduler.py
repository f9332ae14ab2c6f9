"""What starts when, and where: any cases, any devices."""

from __future__ import annotations

import heapq
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild_smoke.run.scheduler import Job, Scheduler

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "bench_packing.py"


def job(key: str, world_size: int = 1, seconds: float | None = 1.0, weights_of: str | None = None) -> Job:
    return Job(key=key, world_size=world_size, seconds=seconds, weights_of=weights_of)


def keys(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    return [start.job.key for start in scheduler.start(now)]


WIDE = [job(f"wide{number}", 2, 3.0) for number in range(4)]


@pytest.mark.parametrize(
    ("jobs", "devices", "first"),
    [
        # Most devices first, then the longest.
        ([job("short"), job("wide", 2), job("widest", 4), job("twin", 4, 3.0)], 4, ["twin"]),
        # One that all would wait for goes before those; a chain counts with all its links.
        ([*WIDE, job("endless", 1, 9.0)], 4, ["endless", "wide0"]),
        ([*WIDE, job("base", 1, 1.0), job("next", 1, 9.0, "base")], 4, ["base", "wide0"]),
        ([*WIDE, job("normal", 1, 3.0)], 4, ["wide0", "wide1"]),
        # The baseline of large cases goes before that of small ones.
        ([job("a"), job("b"), job("b2", 8, weights_of="b"), job("a2", 2, weights_of="a")], 8, ["b", "a"]),
    ],
)
def test_jobs_that_start_first(jobs: list[Job], devices: int, first: list[str]) -> None:
    assert keys(Scheduler(jobs, range(devices))) == first


@pytest.mark.parametrize("report", [Scheduler.weights_saved, Scheduler.ended])
def test_case_waits_for_the_weights_or_the_end_of_its_baseline(report: Callable[[Scheduler, str], None]) -> None:
    scheduler = Scheduler([job("base"), job("case", 2, weights_of="base")], range(4))
    assert keys(scheduler) == ["base"]
    assert keys(scheduler) == []
    report(scheduler, "base")
    assert keys(scheduler) == ["case"]


def test_comparison_waits_for_both_ends() -> None:
    compare = Job(key="compare", world_size=1, after=("base", "case"))
    scheduler = Scheduler([job("base"), job("case", 2, weights_of="base"), compare], range(4))
    keys(scheduler)
    scheduler.weights_saved("base")
    keys(scheduler)
    scheduler.ended("base")
    assert keys(scheduler) == []
    scheduler.ended("case")
    assert keys(scheduler) == ["compare"]


def test_urgent_goes_before_all_that_may_run() -> None:
    compare = Job(key="compare", world_size=1, seconds=0.1, after=("first",), urgent=True)
    scheduler = Scheduler([job("first", 2), job("wide", 2, 9.0), job("long", 1, 99.0), compare], range(2))
    assert keys(scheduler) == ["long"]
    scheduler.ended("long")
    assert keys(scheduler, 9.0) == ["wide"]
    scheduler.ended("wide")
    assert keys(scheduler, 18.0) == ["first"]
    scheduler = Scheduler([job("first", 2, 10.0), job("wide", 2, 9.0), job("long", 1, 9.0), compare], range(2))
    assert keys(scheduler) == ["first"]
    scheduler.ended("first")
    # "wide" waits for both places; "long" would keep it waiting.
    assert keys(scheduler, 10.0) == ["compare"]


def test_reservation_lets_only_what_ends_before_it_pass() -> None:
    waiting = [job("all", 4, 4.0, "base"), job("slow", 2, 5.0, "base"), job("quick", 2, 3.0, "base")]
    scheduler = Scheduler([job("base", 1, 4.0), *waiting, job("other", 4, 4.0, "base")], range(4))
    assert keys(scheduler) == ["base"]
    scheduler.weights_saved("base")
    # Four devices are free when base ends: slow would hold two of them longer.
    assert keys(scheduler) == ["quick"]
    scheduler.ended("base")
    scheduler.ended("quick")
    assert keys(scheduler, 4.0) == ["all"]


def test_without_estimates_small_jobs_pass_a_large_one_that_waits() -> None:
    def waiting(seconds: float | None) -> Scheduler:
        small = [job(f"small{number}", 1, seconds) for number in range(6)]
        late = [job(f"late{number}", 4, seconds, "base") for number in range(4)]
        scheduler = Scheduler([job("base", 1, seconds), *small, *late], range(4))
        assert keys(scheduler) == ["base", "small0", "small1", "small2"]
        scheduler.weights_saved("base")
        scheduler.ended("small0")
        return scheduler

    # All seem to end together: the place that is free is not left so.
    assert keys(waiting(None), 1.0) == ["small3"]
    # Where it is known that it would delay the large one, it waits.
    assert keys(waiting(15.0), 1.0) == []


def test_unknown_duration_is_the_median_of_the_known() -> None:
    scheduler = Scheduler(
        [job("a", seconds=2), job("b", seconds=4), job("c", seconds=9), job("d", seconds=None)], range(1)
    )
    assert scheduler.seconds(job("d", seconds=None)) == 4
    # Comparisons are known, short, and no cases.
    compare = Job(key="compare", world_size=1, seconds=3.0, after=("d",), urgent=True)
    assert Scheduler([job("d", seconds=None), compare], range(1)).seconds(job("d", seconds=None)) == 15


def test_devices_are_neighbours_where_they_can_be() -> None:
    scheduler = Scheduler([job("pair", 2, 9.0), job("one", 1, 3.0), job("other", 1, 2.0)], range(4))
    assert {start.job.key: start.devices for start in scheduler.start(0)} == {
        "pair": (0, 1),
        "one": (2,),
        "other": (3,),
    }
    for free, chosen in (([1, 2, 3], (2, 3)), ([1, 4, 6], (1, 4))):
        assert Scheduler([job("pair", 2)], free).start(0)[0].devices == chosen


def test_dropped_job_is_waited_for_no_more() -> None:
    scheduler = Scheduler([job("base"), Job(key="after", world_size=1, after=("base",))], range(1))
    scheduler.dropped("base")
    assert keys(scheduler) == ["after"]


@dataclass(frozen=True)
class Drawn:
    """Jobs, how long they really take, and when after their start baselines save their weights."""

    jobs: Sequence[Job]
    seconds: Mapping[str, float]
    saved_after: Mapping[str, float]
    devices: int


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    devices = draw(st.integers(1, 16))
    durations = st.floats(0.01, 100)
    jobs: list[Job] = []
    seconds: dict[str, float] = {}
    saved: dict[str, float] = {}
    for number in range(draw(st.integers(1, 4))):
        base = job(f"base{number}", 1, draw(st.none() | durations))
        jobs.append(base)
        seconds[base.key] = draw(durations)
        if draw(st.booleans()):
            saved[base.key] = seconds[base.key] * draw(st.floats(0, 1))
        for case_number in range(draw(st.integers(0, 6))):
            size = draw(st.integers(1, devices))
            case = job(f"case{number}-{case_number}", size, draw(st.none() | durations), base.key)
            jobs.append(case)
            # Estimates may be far from the truth.
            seconds[case.key] = draw(durations)
            if draw(st.booleans()):
                compare = Job(key=f"{case.key} weights", world_size=1, after=(base.key, case.key))
                jobs.append(compare)
                seconds[compare.key] = draw(durations)
    return Drawn(draw(st.permutations(jobs)), seconds, saved, devices)


@settings(max_examples=40)
@given(drawn())
def test_whatever_runs_shares_no_device_has_its_weights_and_all_runs(given_jobs: Drawn) -> None:
    scheduler = Scheduler(given_jobs.jobs, range(given_jobs.devices))
    busy: set[int] = set()
    assigned: dict[str, tuple[int, ...]] = {}
    saved: set[str] = set()
    ended: set[str] = set()
    events: list[tuple[float, int, str]] = []
    now = 0.0
    while not scheduler.done:
        for start in scheduler.start(now):
            wanted = start.job
            assert len(set(start.devices)) == wanted.world_size
            assert busy.isdisjoint(start.devices)
            assert busy.union(start.devices) <= set(range(given_jobs.devices))
            assert wanted.weights_of is None or wanted.weights_of in saved | ended
            assert ended.issuperset(wanted.after)
            busy.update(start.devices)
            assigned[wanted.key] = start.devices
            heapq.heappush(events, (now + given_jobs.seconds[wanted.key], 1, wanted.key))
            if wanted.key in given_jobs.saved_after:
                heapq.heappush(events, (now + given_jobs.saved_after[wanted.key], 0, wanted.key))
        # Something runs as long as something waits.
        assert events
        now, kind, key = heapq.heappop(events)
        if kind == 0:
            saved.add(key)
            scheduler.weights_saved(key)
        else:
            ended.add(key)
            busy.difference_update(assigned.pop(key))
            scheduler.ended(key)
    assert ended == {one.key for one in given_jobs.jobs}


@pytest.mark.slow
def test_recorded_durations_are_packed_within_what_is_promised() -> None:
    """The benchmark, as it is called: it exits 1 where a makespan is too long, for 1 to 64 devices."""
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
