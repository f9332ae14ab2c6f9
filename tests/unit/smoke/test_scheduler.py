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


def job(key: str, world_size: int = 1, weights_of: str | None = None) -> Job:
    return Job(key=key, world_size=world_size, weights_of=weights_of)


def keys(scheduler: Scheduler) -> list[str]:
    return [start.job.key for start in scheduler.start()]


@pytest.mark.parametrize(
    ("jobs", "devices", "first"),
    [
        # Most devices first, and then in the given order.
        ([job("first"), job("wide", 2), job("widest", 4), job("twin", 4)], 4, ["widest"]),
        # What fits starts in the place of what does not.
        ([job("wide", 4), job("half", 2), job("second", 2), job("one")], 3, ["half", "one"]),
        # Baselines that others wait for go before all that are wider.
        ([job("wide", 4), job("alone"), job("base"), job("case", 2, "base")], 4, ["base", "alone"]),
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


def test_case_whose_weights_are_compared_waits_for_the_end_of_its_baseline() -> None:
    case = Job(key="case", world_size=2, weights_of="base", needs_final_weights=True)
    scheduler = Scheduler([job("base"), case], range(4))
    keys(scheduler)
    scheduler.weights_saved("base")
    assert keys(scheduler) == []
    scheduler.ended("base")
    assert keys(scheduler) == ["case"]


def test_devices_are_neighbours_where_they_can_be() -> None:
    scheduler = Scheduler([job("pair", 2), job("one"), job("other")], range(4))
    assert {start.job.key: start.devices for start in scheduler.start()} == {
        "pair": (0, 1),
        "one": (2,),
        "other": (3,),
    }
    for free, chosen in (([1, 2, 3], (2, 3)), ([1, 4, 6], (1, 4))):
        assert Scheduler([job("pair", 2)], free).start()[0].devices == chosen


def test_dropped_job_is_waited_for_no_more() -> None:
    scheduler = Scheduler([job("base"), job("case", weights_of="base")], range(1))
    scheduler.dropped("base")
    assert keys(scheduler) == ["case"]


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
        base = job(f"base{number}")
        jobs.append(base)
        seconds[base.key] = draw(durations)
        if draw(st.booleans()):
            saved[base.key] = seconds[base.key] * draw(st.floats(0, 1))
        for case_number in range(draw(st.integers(0, 6))):
            size = draw(st.integers(1, devices))
            final = draw(st.booleans())
            key = f"case{number}-{case_number}"
            jobs.append(Job(key=key, world_size=size, weights_of=base.key, needs_final_weights=final))
            seconds[key] = draw(durations)
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
        for start in scheduler.start():
            wanted = start.job
            assert len(set(start.devices)) == wanted.world_size
            assert busy.isdisjoint(start.devices)
            assert busy.union(start.devices) <= set(range(given_jobs.devices))
            assert wanted.weights_of in {None, *(ended if wanted.needs_final_weights else saved | ended)}
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
    """The benchmark, as it is called: it exits 1 where a makespan is too long."""
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
