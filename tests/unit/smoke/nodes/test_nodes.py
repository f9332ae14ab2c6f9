"""Runs over two nodes: two processes of the real command line on this machine, with fake ranks."""

from __future__ import annotations

import json
import os
import signal
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

    def write(self, *cases: Document) -> None:
        (self.folder / "plan.json").write_text(json.dumps(plan_document(*cases)))
        token = self.folder / "token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)

    def start(self, rank: int, *words: str, nodes: int = 2, out: str = "out") -> subprocess.Popen[str]:
        own = ["--nodes", str(nodes), "--node-rank", str(rank), "--head", "127.0.0.1:0", "--token-file", "token"]
        command = [*FAKE_COMMAND, "run", "--plan", "plan.json", "--out", out, *own, *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def cases(self) -> dict[str, Document]:
        return {line["case"]: line for line in read_results(self.folder / "out") if line["type"] == "case"}


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    path = os.pathsep.join([str(HERE), *(str(HERE.parents[2] / name) for name in ("smoke", "tests"))])
    return Nodes(tmp_path, {**os.environ, "PYTHONPATH": path})


def test_cases_over_two_nodes_and_on_either(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"), two_ranks("train-one"))
    running = [nodes.start(rank) for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert {name: case["status"] for name, case in nodes.cases.items()} == dict.fromkeys(
        ("train-baseline", "train-n2", "train-one"), "completed"
    )
    one, two = (case["nodes"] for name, case in nodes.cases.items() if name != "train-baseline")
    assert sorted([one, two], key=len) == [[0], [0, 1]] or sorted([one, two], key=len) == [[1], [0, 1]]
    assert not list((nodes.folder / "out").glob(".canary*"))


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
    assert cases["train-one"]["status"] == "completed"
    assert "node 1 (" in cases["hangs-n2"]["failure"]["message"]
    assert "was lost: " in cases["hangs-n2"]["failure"]["message"]
    assert "it needs 2 nodes; node 1 (" in cases["train-n2"]["failure"]["message"]


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
