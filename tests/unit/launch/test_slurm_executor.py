"""Whose job a run's folder has, before any is submitted."""

from __future__ import annotations

import json

import pytest
from helpers.slurm_jobs import cluster_of

from envbuild.core.errors import ConfigurationError
from envbuild.launch.executors import OnCluster
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.executor import SlurmExecutor
from envbuild.launch.slurm.record import JobRecord, write_record

NONCE = "a" * 32


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"nonce": NONCE}))
    return tmp_path


def executor_on(name, folder):
    """Of a cluster that must not be asked."""
    where = OnCluster(name=name, cluster=cluster_of(""), nodes=2)
    return SlurmExecutor(image=None, where=where, folder=folder, commands=SlurmCommands(login="nowhere"), reporter=None)


def test_job_on_another_cluster_is_not_looked_for_here(folder):
    write_record(JobRecord(job="7", cluster="first", folder="/shared/runs/x", nonce=NONCE), folder)
    with pytest.raises(ConfigurationError) as caught:
        executor_on("second", folder).joins()
    assert caught.value.what == f"the run in {folder} is job 7 on first, not on second"
    assert "--on first" in caught.value.fix


def test_plan_without_its_nonce_is_named(folder):
    (folder / "plan.json").write_text("{")
    with pytest.raises(ConfigurationError, match=f"{folder}/plan.json is damaged"):
        executor_on("first", folder).joins()
