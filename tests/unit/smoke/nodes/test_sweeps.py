"""Sweeps over several nodes with fake ranks: one that hangs, fails or is lost ends by its name, and no other does."""

from __future__ import annotations

import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import plan_document, read_results
from unit.smoke.conftest import BASELINE
from unit.smoke.nodes.test_nodes import HERE, Nodes

from envbuild_smoke.network.limits import outcomes_of
from envbuild_smoke.network.rounds import bad_nodes
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import BandwidthLine

COUNT = 4
SWEEP = {"ranks": 1, "sizes_bytes": [1024], "floor_gigabytes_per_second": None}
PAIRS_WITH_3 = [(2, 3), (1, 3)]


class Swept:
    """A run of which node 3 has something wrong with its ranks."""

    def __init__(self, folder: Path, fault: str) -> None:
        path = os.pathsep.join([str(HERE), *(str(HERE.parents[2] / name) for name in ("smoke", "tests"))])
        self.out = folder / "out"
        self._plan = json.dumps({**plan_document(BASELINE), "nodes": COUNT, "bandwidth": SWEEP}).encode()
        healthy = Nodes(folder, {**os.environ, "PYTHONPATH": path})
        wrong = Nodes(folder, {**healthy.environment, "FAKE_SWEEP": fault})
        healthy.write(BASELINE)
        (folder / "plan.json").write_bytes(self._plan)
        self.running = [(healthy if rank < COUNT - 1 else wrong).start(rank, nodes=COUNT) for rank in range(COUNT)]

    def end(self) -> list[int]:
        for process in self.running:
            process.communicate(timeout=120)
        return [process.returncode for process in self.running]

    @property
    def lines(self) -> dict[tuple[int, ...], BandwidthLine]:
        lines = [line for line in read_results(self.out) if line["type"] == "bandwidth"]
        return {tuple(line["nodes"]): read_object(BandwidthLine, line, "bandwidth") for line in lines}

    @property
    def bad(self) -> tuple[int, ...]:
        plan = parse_plan(self._plan)
        return tuple(bad_nodes(range(COUNT), outcomes_of(plan, list(self.lines.values()))))

    def failures(self) -> dict[tuple[int, ...], str]:
        return {nodes: line.failure.message for nodes, line in self.lines.items() if line.failure is not None}


def check_others(swept: Swept) -> None:
    """The other nodes were measured, also together, and node 3 is known to be the bad one."""
    assert list(swept.failures()) == PAIRS_WITH_3
    assert [nodes for nodes in swept.lines if nodes not in PAIRS_WITH_3] == [(0, 1), (0, 2), (0, 1, 2)]
    assert swept.bad == (3,)


@pytest.mark.slow
def test_a_sweep_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    swept = Swept(tmp_path, "hangs")
    assert swept.end() == [0] * COUNT
    check_others(swept)
    assert all(
        "not done after 4 s, with the sweep; ranks still running: 1" in text for text in swept.failures().values()
    )


def test_what_nccl_logged_before_a_sweep_failed_is_in_the_results(tmp_path: Path) -> None:
    swept = Swept(tmp_path, "raises")
    assert swept.end() == [0] * COUNT
    check_others(swept)
    for nodes in PAIRS_WITH_3:
        line: Any = swept.lines[nodes]
        assert (line.failure.message, line.failure.rank) == ("RuntimeError: planted in the sweep", 1)
        assert line.transports == ("NET/Socket",)
        assert line.network_log == ("NET/IB : No device found.", "Using network Socket")


def test_a_node_that_is_lost_while_it_measures_is_named(tmp_path: Path) -> None:
    swept = Swept(tmp_path, "hangs")
    head, *_, other = swept.running
    assert head.stdout is not None
    ended = (line for line in head.stdout if '"case-finished"' in line)
    # The baseline, on each node.
    assert len(list(islice(ended, COUNT))) == COUNT
    other.send_signal(signal.SIGKILL)
    assert swept.end()[:-1] == [0] * (COUNT - 1)
    check_others(swept)
    assert all(text.startswith("node 3 (") and " was lost: " in text for text in swept.failures().values())
