"""Real Megatron-Core over two nodes of a real Slurm: killed, preempted, a lost node; the verdicts are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.kept_entries import keep_environment
from helpers.processes import wait_until
from helpers.slurm_cluster import slurm_cluster, slurm_programs
from helpers.slurm_project import record_of, write_cluster
from helpers.slurm_site import Site

from envbuild.catalog.catalog import Selection
from envbuild.lock.lockdir import find_lock

pytestmark = pytest.mark.slow

STACK = ("--stack", "mcore", "--target", "cpu")
# Over both nodes, and within each.
CASES = ("gpt-fp32-dp2-n2", "gpt-fp32-pp2-n2", "gpt-fp32-tp2")


@pytest.fixture(scope="module")
def imaged(tool: Tool, selection: Selection) -> Tool:
    tool.run("lock", *STACK)
    keep_environment(selection, find_lock(tool.project, selection), tool.cache)
    tool.run("image", *STACK, "--format", "oci,sqsh")
    return tool


@pytest.fixture(scope="module")
def real(imaged: Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("slurm")
    storage = folder / "storage"
    storage.mkdir()
    write_cluster(imaged.project, storage)
    with slurm_cluster(slurm_programs(shared_folder(tmp_path_factory) / "slurm"), folder / "c", nodes=4) as cluster:
        tool = Tool(imaged.project, imaged.cache, {**imaged.env, **cluster.environment})
        only = [word for case in CASES for word in ("--only", case)]
        yield Site(cluster, tool, storage, ("certify", *STACK, *only, "--fresh"))


def verdicts(printed: str) -> dict[tuple[str, int], Any]:
    """Whether each case passed, and its numbers."""
    return {
        (case["id"], case["repeat"]): (case["passed"], [(step["loss"], step["grad_norm"]) for step in case["steps"]])
        for case in json.loads(printed)["cases"]
    }


@pytest.fixture(scope="module")
def undisturbed(real: Site) -> dict[tuple[str, int], Any]:
    expected = verdicts(real.certify("--json").stdout)
    assert {name for name, _ in expected} == {"gpt-fp32-baseline", *CASES}
    assert all(passed for passed, _ in expected.values())
    return expected


def ended_cases(site: Site, least: int) -> None:
    """Wait until so many cases have ended."""

    def have_ended() -> bool:
        folder = site.run_folder
        return folder is not None and (folder / "results/results.jsonl").read_text().count('"type": "case"') >= least

    wait_until(have_ended)


def test_preempted_job_has_the_same_verdicts(real: Site, undisturbed: dict[tuple[str, int], Any]) -> None:
    with real.started("--json") as process:
        ended_cases(real, 1)
        number = record_of(real.out)["job"]
        urgent = real.slurm("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--wrap", "sleep 600").strip()
        real.start_again(number)
        real.slurm("scancel", urgent)
        printed, told = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert told.count("running on") == 2
    assert verdicts(printed) == undisturbed


@pytest.mark.parametrize("killed", ["job", "batch script"])
def test_killed_job_has_the_same_verdicts_after_resume(
    real: Site, undisturbed: dict[tuple[str, int], Any], killed: str
) -> None:
    with real.started("--json") as process:
        ended_cases(real, 1)
        number = record_of(real.out)["job"]
        if killed == "job":
            real.slurm("scancel", number)
        else:
            os.kill(batch_script(number), signal.SIGKILL)
        _, told = process.communicate(timeout=600)
    assert process.returncode == 8, told
    assert "ended before its cases did" in told
    assert verdicts(real.certify("--json", "--resume").stdout) == undisturbed


def batch_script(number: str) -> int:
    """The process of a job's batch script."""
    done = subprocess.run(["pgrep", "-f", f"/job{int(number):05d}/slurm_script"], capture_output=True, text=True)
    return int(done.stdout.split()[0])


def test_job_of_a_lost_node_goes_on_on_others_with_the_same_verdicts(
    real: Site, undisturbed: dict[tuple[str, int], Any]
) -> None:
    with real.started("--json") as process:
        ended_cases(real, 1)
        number = record_of(real.out)["job"]
        real.slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        real.start_again(number)
        printed, told = process.communicate(timeout=600)
    real.slurm("scontrol", "update", "nodename=n2", "state=resume")
    assert process.returncode == 0, told
    assert verdicts(printed) == undisturbed
