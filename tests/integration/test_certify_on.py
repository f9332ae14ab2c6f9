"""`certify --on`: a job of a real Slurm on virtual nodes, followed, left, found again, preempted and lost."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.mini import NAME as STACK
from helpers.processes import wait_until
from helpers.programs import path_without
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_project import NAME, record_of, stepping_runner, write_cluster
from helpers.slurm_site import Site

from envbuild.certify.run import job

CERTIFY = ("certify", "--stack", STACK, "--target", "cpu", "--only", "gpt-fp32-tp2", "--in", "sqsh")


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(slurm_programs(shared_folder(tmp_path_factory) / "slurm"), folder / "c", nodes=4) as running:
        yield running


@pytest.fixture
def site(
    virtual: Cluster, mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    project = tmp_path / "project"
    subprocess.run(["cp", "-al", mini.project, project], check=True)
    write_cluster(project, tmp_path / "storage")
    runner = stepping_runner(tmp_path, tmp_path / "storage")
    (tmp_path / "storage").mkdir()
    monkeypatch.setattr(job, "smoke_file", lambda _store: runner)
    tool = Tool(project, mini.cache, {**mini.env, **virtual.environment})
    yield Site(virtual, tool, tmp_path / "storage", CERTIFY, runner[0])
    virtual.end_jobs()


def hold(site: Site) -> None:
    """Have jobs wait behind their first case."""
    (site.storage / "hold").touch()


def release(site: Site) -> None:
    (site.storage / "hold").unlink()


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
    # A certificate that stands says nothing about a job that is named, and a judged job is judged again.
    printed = site.certify("--judge", "424242", status=3).stderr
    assert "job 424242 on virtual is not of this certification" in printed
    assert "certified: 2 cases" in site.certify("--judge", record["job"]).stdout


@pytest.mark.slow
def test_a_certificate_of_one_cluster_says_nothing_about_another(site: Site, tmp_path: Path) -> None:
    site.certify()
    write_cluster(site.tool.project, tmp_path / "elsewhere", name="second")
    line = [*CERTIFY, "--out-dir", "out", "--on", "second", "--nodes", "2"]
    printed = site.tool.run(*line, status=3).stderr
    assert f"does not count: its cases ran on cluster {NAME}, not on second" in printed
    assert f"cluster second has no folder {tmp_path}/elsewhere" in printed
    (tmp_path / "elsewhere").symlink_to(site.storage)
    assert "certified: 2 cases" in site.tool.run(*line).stdout


@pytest.mark.slow
def test_a_run_that_begins_anew_leaves_nothing_of_the_last_one(site: Site) -> None:
    (site.storage / "ends").write_text(json.dumps(["a library is broken", 3]))
    site.certify(status=8)
    assert len(list((site.storage / "runs").iterdir())) == 1
    (site.storage / "ends").unlink()
    site.certify()
    assert not list((site.storage / "runs").iterdir())


def interrupted(process: subprocess.Popen[str]) -> str:
    """What it printed to its user after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    return printed


@pytest.mark.slow
def test_job_that_ctrl_c_left_is_followed_by_the_command_that_it_prints(site: Site) -> None:
    hold(site)
    with site.started() as process:
        printed = interrupted(process)
    number = record_of(site.out)["job"]
    assert f"job {number} on {NAME} goes on" in printed
    again, cancel = re.search(r"Follow it again: envbuild (.*)\. Cancel it: (.*)", printed).groups()  # type: ignore[union-attr]
    assert (site.state(number), cancel) == ("RUNNING", f"scancel {number}")
    release(site)
    done = site.tool.run(*shlex.split(again))
    assert "submitted" not in done.stderr
    assert "certified: 2 cases" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["later", "before it could write the record"])
def test_same_command_follows_a_job_that_a_killed_one_left(site: Site, killed: str) -> None:
    hold(site)
    with site.started() as process:
        process.kill()
        process.wait()
    if killed != "later":
        (record,) = site.out.glob("certificates/*/*/run/job.json")
        record.unlink()
    release(site)
    done = site.certify()
    assert "submitted" not in done.stderr
    assert "certified: 2 cases" in done.stdout


@pytest.mark.slow
def test_job_that_was_cancelled_goes_on_with_resume(site: Site) -> None:
    hold(site)
    with site.started() as process:
        before = record_of(site.out)
        results = site.run_folder / "results/results.jsonl"  # type: ignore[operator]
        wait_until(lambda: len(results.read_text().splitlines()) == 2)
        kept = results.read_text()
        site.slurm("scancel", before["job"])
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 8
    assert f"job {before['job']} on {NAME} ended before its cases did: it was cancelled" in printed
    assert "Cases that had ended are kept: run the same command with --resume, and without --judge." in printed
    assert "CANCELLED AT" in printed
    release(site)
    done = site.certify("--resume")
    after = record_of(site.out)
    assert (after["nonce"], after["folder"]) == (before["nonce"], before["folder"])
    assert after["job"] != before["job"]
    assert "certified: 2 cases" in done.stdout
    (brought,) = site.out.glob("certificates/*/*/run/results/results.jsonl")
    assert brought.read_text().startswith(kept)


@pytest.mark.slow
def test_preempted_job_goes_on_by_itself(site: Site) -> None:
    hold(site)
    with site.started() as process:
        number = record_of(site.out)["job"]
        urgent = site.slurm("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--wrap", "sleep 600").strip()
        site.start_again(number)
        release(site)
        site.slurm("scancel", urgent)
        out, printed = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    assert "certified: 2 cases" in out
    assert record_of(site.out)["job"] == number
    assert "Restarts=1" in site.slurm("scontrol", "show", "job", number)


@pytest.mark.slow
def test_controller_that_is_away_for_a_while_changes_nothing(site: Site) -> None:
    hold(site)
    controller = int((site.cluster.folder / "slurmctld.pid").read_text())
    with site.started() as process:
        assert process.stderr is not None
        os.kill(controller, signal.SIGSTOP)
        try:
            assert any("Slurm does not answer, and the job goes on meanwhile" in line for line in process.stderr)
        finally:
            os.kill(controller, signal.SIGCONT)
        release(site)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "certified: 2 cases" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message", "code", "expected"),
    [
        (
            3,
            "the results folder is not the same on node 1",
            8,
            "environment cannot run the plan.*not the same on node 1",
        ),
        (2, "--image x is another one", 8, "environment cannot run the plan.*--image x is another one"),
        (7, "3 cases were not started", 8, "the time limit of job .* came before the last case.*3 cases were not"),
        (5, "[Errno 28] No space left on device", 8, "ended before its cases did: .*Make room in "),
        (0, "done", 8, "ended before its cases did: it ended.*have no end"),
    ],
)
def test_job_without_results_tells_why(site: Site, status: int, message: str, code: int, expected: str) -> None:
    (site.storage / "ends").write_text(json.dumps([message, status]))
    printed = site.certify(status=code).stderr
    assert re.search(expected, printed, re.DOTALL), printed


@pytest.mark.slow
def test_job_that_failed_with_whole_results_passes(site: Site) -> None:
    (site.storage / "last-status").write_text("9")
    done = site.certify()
    assert "it ended with a failure" in done.stderr
    assert "certified: 2 cases" in done.stdout


@pytest.mark.slow
def test_job_that_is_out_of_time_is_queued_again_as_often_as_asked(site: Site) -> None:
    (site.storage / "ends").write_text(json.dumps(["4 cases were not started", 7]))
    with site.started("--requeue", "1", results=False) as process:
        record = record_of(site.out)
        wait_until(
            lambda: re.search(r"PENDING.*Restarts=1", site.slurm("scontrol", "show", "job", record["job"]), re.S)
        )
        site.start_again(record["job"])
        _, printed = process.communicate(timeout=100)
    assert process.returncode == 8
    assert "the time limit of job" in printed
    assert len(Path(record["folder"], "requeued.txt").read_text().splitlines()) == 1
    assert "Restarts=1" in site.slurm("scontrol", "show", "job", record["job"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slurm", "code", "expected"),
    [
        ({"partition": "fast"}, 8, "Slurm refuses the job.*The cluster has the partitions all, urgent"),
        ({"partition": "urgent", "time_limit_minutes": 90}, 8, "would never start.*more time than its partition gives"),
        ({"nodelist": "n9"}, 8, "Slurm refuses the job.*Invalid node name"),
    ],
)
def test_what_slurm_will_not_run_is_refused(site: Site, slurm: dict[str, Any], code: int, expected: str) -> None:
    write_cluster(site.tool.project, site.storage, **slurm)
    printed = site.certify(status=code).stderr
    assert re.search(expected, printed, re.DOTALL), printed
    assert not site.slurm("squeue", "--noheader", "--states=PENDING,RUNNING").strip()


@pytest.mark.slow
def test_more_nodes_than_there_are(site: Site) -> None:
    printed = dataclasses.replace(site, nodes=9).certify(status=8).stderr
    assert "would never start, and was cancelled" in printed
    assert "It asks for more nodes than its partition has" in printed


@pytest.mark.slow
def test_machine_without_slurm_names_the_login_node(site: Site, tmp_path: Path) -> None:
    path = path_without(tmp_path / "programs", "sbatch")
    site.tool.env["PATH"] = path
    printed = site.certify(status=8).stderr
    assert f"cannot submit a job to {NAME}: this machine has no Slurm" in printed
    assert "Run this command there, or name one: login in envs/clusters/virtual.toml" in printed


@pytest.mark.slow
def test_damaged_image_on_the_cluster_is_replaced(site: Site) -> None:
    site.certify()
    (placed,) = (site.storage / "images").glob("*.sqsh")
    whole = placed.read_bytes()
    placed.write_bytes(b"x" + whole[1:])
    site.certify("--fresh")
    assert placed.read_bytes() == whole


@pytest.mark.slow
def test_night_certifies_on_the_cluster_and_follows_the_job_of_a_killed_one(site: Site) -> None:
    night = (
        "nightly",
        "--stack",
        STACK,
        "--targets",
        "cpu",
        "--out-dir",
        "out",
        "--on",
        f"cpu={NAME}",
        "--bisect",
        "0",
    )
    hold(site)
    with site.started(line=[*night, "--nodes", "2"]) as process:
        process.kill()
    release(site)
    done = site.tool.run(*night, "--nodes", "2")
    assert "submitted" not in done.stderr
    assert re.search(r"cpu +certify +done", done.stdout), done.stdout
