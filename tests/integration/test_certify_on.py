"""`certify --on`: a job of a real Slurm on virtual nodes, followed, left, found again, preempted and lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.mini import NAME as STACK
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_project import NAME, record_of, stepping_runner, write_cluster

from envbuild.certify.run import job

CERTIFY = ("certify", "--stack", STACK, "--target", "cpu", "--only", "gpt-fp32-tp2", "--in", "sqsh")


@dataclass(frozen=True)
class Site:
    """A virtual cluster, and the command line in a project that has its file."""

    cluster: Cluster
    tool: Tool
    storage: Path

    def certify(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.tool.run(*CERTIFY, "--out-dir", "out", "--on", NAME, "--nodes", "2", *words, status=status)


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(slurm_programs(shared_folder(tmp_path_factory) / "slurm"), folder / "c", nodes=4) as running:
        yield running


@pytest.fixture
def site(
    virtual: Cluster, mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    project = tmp_path / "project"
    subprocess.run(["cp", "-a", mini.project, project], check=True)
    write_cluster(project, tmp_path / "storage")
    runner = stepping_runner(tmp_path)
    monkeypatch.setattr(job, "smoke_file", lambda _store: runner)
    environment = {**virtual.programs.environment, "SLURM_CONF": f"{virtual.folder}/slurm.conf"}
    return Site(virtual, Tool(project, mini.cache, {**mini.env, **environment}), tmp_path / "storage")


def test_job_over_two_nodes_is_certified_and_its_folder_removed(site: Site) -> None:
    done = site.certify("--json")
    result = json.loads(done.stdout)
    assert (result["ran"], result["written"]) == (True, True)
    assert {case["id"] for case in result["cases"]} == {"gpt-fp32-baseline", "gpt-fp32-tp2"}
    record = record_of(site.tool.project / "out")
    assert f"submitted job {record['job']} to {NAME}" in done.stderr
    assert not Path(record["folder"]).exists()
    images = list((site.storage / "images").glob("*.sqsh"))
    assert len(images) == 1
    assert "nothing to do" in site.certify().stdout
