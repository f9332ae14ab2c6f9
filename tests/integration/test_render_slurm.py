"""Rendered batch scripts under a real Slurm of two virtual nodes: taken by sbatch, and their words in the step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.processes import wait_until
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_jobs import cluster_of, job_of
from unit.launch.test_render import EVIL

from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.job import SlurmJob
from envbuild.launch.slurm.render import render_sbatch

# Stands where a node's Python is: it writes down what it was started with.
OPENER = """\
#!/bin/sh
printf '%s\\0' "$@" >"{folder}/words-$SLURM_NODEID"
env -0 >"{folder}/variables-$SLURM_NODEID"
for word in "$@"; do
    case $word in --image=*) cat "${{word#--image=}}" >"{folder}/image-$SLURM_NODEID" ;; esac
done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(slurm_programs(shared_folder(tmp_path_factory) / "slurm"), folder / "c", nodes=2) as running:
        # The nodes come after the controller.
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        wait_until(lambda: running.run(*idle, cwd=folder).stdout.strip() == "2")
        yield running


def job(folder: Path, more: str = "", slurm: str = "") -> SlurmJob:
    """A job of two nodes whose image is opened by the opener.

    Args:
        slurm: more lines of [slurm].
    """
    opener = folder / "opener"
    opener.write_text(OPENER.format(folder=folder))
    opener.chmod(0o755)
    variables = "\n".join(f"V{number} = {json.dumps([word])}" for number, word in enumerate(EVIL))
    text = f"""[slurm]
runtime = "bwrap"
python = "{opener}"
partition = "urgent"
directives = [{{ line = "--comment='a comment'", reason = "for the test" }}]
{slurm}
{more}
[transport]
network = "NET/Socket"
[transport.variables]
{variables}
J = ["{{job_id}}"]
"""
    cluster = cluster_of(text)
    assert cluster.slurm is not None
    # The virtual nodes have no GPUs.
    cluster = cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"gpus_per_node": 0})})
    (folder / "run").mkdir()
    (folder / "run/smoke.pyz").touch()
    image = folder / "image.sqsh"
    image.write_bytes(b"an image\n")
    return replace(job_of(cluster, folder=f"{folder}/run"), image=str(image))


def submit(cluster: Cluster, job: SlurmJob, folder: Path, *words: str) -> str:
    script = folder / "job.sbatch"
    script.write_text(render_sbatch(job))
    done = cluster.run("sbatch", *words, str(script), cwd=folder, PYTHONPATH="/somewhere", NCCL_NET="Socket")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("slurm", ["", "exclusive = false", 'nodelist = "n[1-2]"'])
def test_sbatch_takes_the_script(cluster: Cluster, tmp_path: Path, slurm: str) -> None:
    submit(cluster, job(tmp_path, slurm=slurm), tmp_path, "--test-only")


def test_variables_and_the_nodes_numbers_reach_the_step_as_they_are_written(cluster: Cluster, tmp_path: Path) -> None:
    more = f'[image]\nby = "sbcast"\nnode_folder = "{tmp_path}"'
    number = submit(cluster, job(tmp_path, more), tmp_path, "--parsable")
    # sbatch --wait asks every ten seconds.
    wait_until(lambda: not cluster.run("squeue", "--noheader", f"--jobs={number}", cwd=tmp_path).stdout)
    log = (tmp_path / f"run/slurm-{number}.log").read_text()
    for node in range(2):
        pairs = (tmp_path / f"variables-{node}").read_text().split("\0")[:-1]
        variables = dict(pair.split("=", 1) for pair in pairs)
        assert [variables[f"V{each}"] for each in range(len(EVIL))] == EVIL, log
        assert variables["J"] == number
        assert not {"PYTHONPATH", "NCCL_NET"} & variables.keys()
        words = (tmp_path / f"words-{node}").read_text().split("\0")[:-1]
        # The head is where node 0 listens, and the time limit is known.
        head, ends_at, token = words[-3:]
        assert (head, int(ends_at) > 1_700_000_000, token) == ("127.0.0.1", True, f"token-{number}-0")
        assert (tmp_path / f"image-{node}").read_bytes() == b"an image\n"
    # The nodes' own copy is gone.
    assert not list(tmp_path.glob("envbuild-*.sqsh"))


def test_a_job_that_is_submitted_from_a_job_has_nothing_of_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Together they are fatal to srun.
    outer = {"SLURM_JOB_ID": "999", "SLURM_NTASKS": "7", "SLURM_MEM_PER_NODE": "1", "SLURM_MEM_PER_CPU": "1"}
    for name, value in {**cluster.environment, **outer}.items():
        monkeypatch.setenv(name, value)
    commands = SlurmCommands()
    number = commands.submit(render_sbatch(job(tmp_path)))
    wait_until(lambda: (state := commands.states([number]).get(number)) is None or state.ended)
    log = (tmp_path / f"run/slurm-{number}.log").read_text()
    assert (tmp_path / "words-1").exists(), log


def test_the_clusters_file_wins_over_variables_of_the_users_shell(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tmp_path)
    of_the_user = {"SBATCH_PARTITION": "all", "SBATCH_JOB_NAME": "mine", "SBATCH_TIMELIMIT": "1", "SBATCH_ACCOUNT": "w"}
    # They would list other jobs, or make this one wait, or many.
    of_the_user |= {"SQUEUE_PARTITION": "all", "SQUEUE_USERS": "nobody", "SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "1-2"}
    for name, value in {**cluster.environment, **of_the_user}.items():
        monkeypatch.setenv(name, value)
    commands = SlurmCommands()
    number = commands.submit(render_sbatch(wanted))
    assert commands.named(wanted.name) == number
    shown = cluster.run("scontrol", "show", "job", number, cwd=tmp_path).stdout
    assert wanted.slurm.time_limit_minutes < 60
    limit = f"TimeLimit=00:{wanted.slurm.time_limit_minutes:02}:00"
    for part in ("Partition=urgent", limit, "Comment=a comment", "Account=w"):
        assert part in shown
    commands.cancel(number)
