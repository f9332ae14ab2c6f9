"""Sweeps over several nodes, each a process of the zipapp on this machine, over gloo."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document, plan_document
from helpers.smoke_plans import read_results as lines_of

from envbuild.certify.judge.network import network_problems
from envbuild.certify.judge.results import read_results
from envbuild_smoke.plan.reader import parse_plan

NODES = 3
SIZES = [4096, 65536]


class Cluster:
    """The nodes of a run; each word of a node's number is given to it alone."""

    def __init__(self, folder: Path, runner: Path, python: Path, plan: Document) -> None:
        self.folder = folder
        self._command = [python, "-I", runner, "run", "--plan", "plan.json", "--out", "out", "--token-file", "token"]
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "token").write_text("0123456789abcdef" * 4)
        (folder / "token").chmod(0o600)

    def start(self, rank: int, *words: str) -> subprocess.Popen[str]:
        own = ["--nodes", str(NODES), "--node-rank", str(rank), "--head", "127.0.0.1:0"]
        pipe = subprocess.PIPE
        return subprocess.Popen([*self._command, *own, *words], cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    @property
    def sweeps(self) -> list[dict[str, Any]]:
        return [line for line in lines_of(self.folder / "out") if line["type"] == "bandwidth"]


def plan_of(**changes: Any) -> Document:
    sweep = {"ranks": 1, "sizes_bytes": SIZES, "floor_gigabytes_per_second": None}
    own = {"subject": {"form": "none"}, "nodes": NODES, "bandwidth": sweep}
    return {**plan_document(case_document("gpt-fp32-baseline")), **own, **changes}


@pytest.mark.slow
def test_sweeps_over_three_nodes(smoke_pyz: Path, stack_python: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, smoke_pyz, stack_python, plan_of())
    running = [cluster.start(rank) for rank in range(NODES)]
    ends = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * NODES, ends
    sweeps = cluster.sweeps
    assert [(line["sweep"], line["nodes"], line["ranks"]) for line in sweeps] == [
        ("pair", [0, 1], 2),
        ("pair", [0, 2], 2),
        ("ramp", [0, 1, 2], 3),
    ]
    # NCCL-tests' formulas: all_reduce moves 2 (n - 1) / n of its bytes, the others (n - 1) / n.
    for line in sweeps:
        share = (line["ranks"] - 1) / line["ranks"]
        assert (line["backend"], line["transports"], line["failure"]) == ("gloo", None, None)
        for name, factor in (("points", 2 * share), ("all_gather", share), ("all_to_all", share)):
            assert [point["bytes"] for point in line[name]] == pytest.approx(SIZES, abs=12)
            for point in line[name]:
                bus = point["bytes"] / point["seconds"] / 1e9 * factor
                assert point["bus_gigabytes_per_second"] == pytest.approx(bus)
    check_verdicts(tmp_path)


def check_verdicts(folder: Path) -> None:
    """gloo is as good as any network, unless the cluster's file expects one."""
    plan = parse_plan((folder / "plan.json").read_bytes())
    results = read_results(folder / "out" / "results.jsonl", plan)
    assert network_problems(plan, results) == []
    problem, *_ = network_problems(replace(plan, transport="NET/IB"), results)
    assert problem.check == "transport"
    assert "ranks communicated by gloo; the cluster's file expects NET/IB" in problem.text
