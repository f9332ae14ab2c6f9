"""Runs over two nodes: two processes of the real command line on this machine, with fake ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document, plan_document, read_results
from unit.smoke.conftest import BASELINE, FAKE_COMMAND, two_ranks

from envbuild_smoke.cli import LOST_HEAD

HERE = Path(__file__).resolve().parents[1]


def over(name: str, nodes: int = 2, **changes: Any) -> Document:
    return two_ranks(name, nodes=nodes, **changes)


@dataclass
class Nodes:
    """The nodes of one run, started one by one."""

    folder: Path
    environment: Mapping[str, str]

    def write(self, *cases: Document, count: int = 2, **changes: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps({**plan_document(*cases), "nodes": count, **changes}))
        token = self.folder / "token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)

    def start(self, rank: int, *words: str, nodes: int = 2, out: str = "out") -> subprocess.Popen[str]:
        own = ["--nodes", str(nodes), "--node-rank", str(rank), "--head", "127.0.0.1:0", "--token-file", "token"]
        command = [*FAKE_COMMAND, "run", "--plan", "plan.json", "--out", out, *own, *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *cases: Document, count: int = 2) -> None:
        """Run cases on all nodes to their end."""
        self.write(*cases, count=count)
        running = [self.start(rank, nodes=count) for rank in range(count)]
        ends = [process.communicate(timeout=120) for process in running]
        assert [process.returncode for process in running] == [0] * count, ends

    @property
    def lines(self) -> list[Document]:
        return read_results(self.folder / "out")

    @property
    def cases(self) -> dict[tuple[str, int], Document]:
        return {(line["case"], line["repeat"]): line for line in self.lines if line["type"] == "case"}


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    path = os.pathsep.join([str(HERE), *(str(HERE.parents[2] / name) for name in ("smoke", "tests"))])
    return Nodes(tmp_path, {**os.environ, "PYTHONPATH": path})


def test_all_nodes_run_the_cases_of_one_and_two_those_of_two(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), two_ranks("train-one"))
    assert {key: (case["status"], case["nodes"]) for key, case in nodes.cases.items()} == {
        ("train-baseline", 1): ("completed", [0]),
        ("train-baseline", 2): ("completed", [1]),
        ("train-one", 1): ("completed", [0]),
        ("train-one", 2): ("completed", [1]),
        ("train-n2", 1): ("completed", [0, 1]),
    }
    assert not list((nodes.folder / "out").glob(".canary*"))


def test_port_that_an_earlier_run_left_is_not_the_last_word(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    (nodes.folder / "out").mkdir()
    (nodes.folder / "out/head.port").write_text(f"{port}\n")
    other, head = nodes.start(1), nodes.start(0)
    _, errors = head.communicate(timeout=120)
    other.communicate(timeout=60)
    assert (head.returncode, other.returncode) == (0, 0), errors


def test_small_cases_have_other_nodes_each_time(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), count=3)
    pairs = [nodes.cases["train-n2", repeat]["nodes"] for repeat in (1, 2, 3)]
    assert pairs == [[0, 1], [1, 2], [2, 0]]
    assert {line["node"] for line in nodes.lines if line["type"] == "node"} == {1, 2}


def test_results_have_what_runs_on_each_node_and_its_clock(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"))
    first, other = nodes.lines[:2]
    assert (first["type"], other["type"], other["node"]) == ("run", "node", 1)
    for name in ("environment", "environment_findings", "machine", "image", "host"):
        assert other[name] == first[name], name
    # Of one machine.
    assert abs(other["clock_ahead_seconds"]) <= other["clock_error_seconds"] < 1
    assert other["free_bytes"] > 0


def test_a_lost_node_ends_its_cases_by_name_and_no_other(nodes: Nodes) -> None:
    # Two slots a node: the first takes all, and the others wait.
    whole = {**case_document("hangs-n2", "train-baseline", data=4), "nodes": 2}
    nodes.write(BASELINE, whole, two_ranks("train-one"), over("train-n2"))
    head, other = nodes.start(0), nodes.start(1)
    assert head.stdout is not None
    for line in head.stdout:
        if '"case-started"' in line and "hangs" in line:
            break
    other.send_signal(signal.SIGKILL)
    _, errors = head.communicate(timeout=120)
    other.communicate()
    assert head.returncode == 1, errors
    cases = nodes.cases
    assert cases["train-one", 1]["status"] == "completed"
    for case in (cases["hangs-n2", 1], cases["train-n2", 1]):
        assert "node 1 (" in case["failure"]["message"]
        assert "was lost: " in case["failure"]["message"]


def test_an_agent_whose_head_is_gone_ends_with_its_ranks(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("hangs-n2", time_limit_seconds=100))
    head, other = nodes.start(0), nodes.start(1)
    assert head.stdout is not None
    for line in head.stdout:
        if '"case-started"' in line and "hangs" in line:
            break
    head.kill()
    head.communicate()
    _, errors = other.communicate(timeout=60)
    assert other.returncode == LOST_HEAD
    assert "node 0: " in errors


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("plan", "node 0 refuses this node: its plan is another one than node 0's"),
        ("token", "it does not have this run's token"),
    ],
)
def test_nodes_that_do_not_belong_together(nodes: Nodes, change: str, expected: str) -> None:
    nodes.write(BASELINE, over("train-n2"))
    head = nodes.start(0)
    assert head.stdout is not None
    next(line for line in head.stdout if '"listening"' in line)
    if change == "plan":
        nodes.write(BASELINE, over("train-other"))
    else:
        (nodes.folder / "token").write_text("f" * 64)
    other = nodes.start(1)
    _, errors = other.communicate(timeout=60)
    assert other.returncode == LOST_HEAD
    assert expected in errors
    head.terminate()
    head.communicate(timeout=60)


def test_a_results_folder_that_is_not_shared(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"))
    (nodes.folder / "elsewhere").mkdir()
    head = nodes.start(0)
    assert head.stdout is not None
    next(line for line in head.stdout if '"listening"' in line)
    (nodes.folder / "elsewhere/head.port").write_text((nodes.folder / "out/head.port").read_text())
    other = nodes.start(1, out="elsewhere")
    _, errors = head.communicate(timeout=300)
    other.communicate(timeout=60)
    assert head.returncode == 3
    assert "is not the same on node 1 as on node 0" in errors
