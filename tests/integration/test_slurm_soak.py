"""Kills at random moments of a job over two hosts of a real Slurm: the verdicts are those of an undisturbed run.

The runner, its agents and the judge are the real ones. The ranks need no torch: they wait for each other over sockets,
and report numbers that agree. ``ENVBUILD_SLURM_RECORD=FILE`` has what happened written there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from e2e.test_certify_on import verdicts
from faults.record import commit, machine
from helpers.mini import NAME as STACK
from helpers.processes import wait_until
from helpers.slurm_cluster import slurm_cluster, slurm_programs
from helpers.slurm_project import ranked_runner, record_of, write_cluster
from helpers.slurm_site import Site
from helpers.virtual_hosts import Host, virtual_hosts

from envbuild.certify.run import job
from envbuild.core import locks
from envbuild.core.files import write_atomic
from envbuild.launch.slurm.job import RUN_FOLDER, RUNNER

pytestmark = pytest.mark.soak

SEEDS = range(1, 21)
# Over both nodes, and within each.
CASES = ("gpt-fp32-dp2-n2", "gpt-fp32-tp2")
RECORD = "ENVBUILD_SLURM_RECORD"
# A node that does not answer for so long is down.
DOWN_SECONDS = 30
# Short outages go unnoticed; long ones lose the node, to Slurm and to node 0.
OUTAGES = (8.0, 50.0)
# Of one command, with its job's second start.
LIMIT_SECONDS = 420.0
# How often a run is resumed before it counts as stuck.
MOST_RESUMES = 2


def digest_of(printed: str) -> str:
    """Of the verdicts and numbers of a run."""
    content = sorted((name, repeat, *each) for (name, repeat), each in verdicts(printed).items())
    return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Trial:
    """A kill and what became of the run."""

    seed: int
    kill: str
    moment_seconds: float
    hit: str = ""
    told: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    verdicts: str = ""
    left: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Soak:
    """The cluster, and how an undisturbed run went.

    Attributes:
        seconds: that it took; its job took most of them.
    """

    site: Site
    hosts: tuple[Host, ...]
    scratch: Path
    expected: str = ""
    seconds: float = 0.0

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def job(self) -> str:
        """The job that was submitted last; "" where there is none."""
        with contextlib.suppress(ValueError, OSError):
            return record_of(self.site.out)["job"]
        return ""

    def job_has_ended(self) -> bool:
        return not self.site.slurm("squeue", "--noheader", f"--jobs={self.job()}").strip()

    def node_of(self, rank: int) -> str:
        """The node of a rank of the job, once it has one; "" where the job has ended."""
        while not (nodes := self.jobs_nodes()) and not self.job_has_ended():
            time.sleep(0.1)
        return nodes[rank] if nodes else ""

    def jobs_nodes(self) -> list[str]:
        """Those of the job that runs now, node 0 first."""
        nodes = self.site.slurm("squeue", "--noheader", f"--jobs={self.job()}", "--format=%N").strip()
        return self.site.slurm("scontrol", "show", "hostnames", nodes).split() if nodes else []

    def runner(self, rank: int) -> tuple[Host, int] | None:
        """The process of a node's runner, and where it is."""
        for host in self.hosts:
            for pid in sorted(host.processes()):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if words[1:3] == [f"{RUN_FOLDER}/{RUNNER}", "run"] and f"--node-rank\0{rank}\0" in "\0".join(words):
                        return host, pid
        return None

    def left(self) -> dict[str, list[str]]:
        """What runs on the hosts that is not Slurm's daemon, by host."""
        daemons = {name: service.process.pid for name, service in self.site.cluster.nodes.items() if service.process}
        found: dict[str, list[str]] = {}
        for host in self.hosts:
            for pid in host.processes(daemons.get(host.name, 0)):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                    if words:
                        found.setdefault(host.name, []).append(f"{pid}: {words[:200]}")
        return found

    def restore(self) -> None:
        """Have all nodes wait for jobs again."""
        for name, service in self.site.cluster.nodes.items():
            self.host(name).connect(True)
            if service.process is None:
                service.start()

        def idle() -> bool:
            states = self.site.slurm("sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %T").splitlines()
            for line in states:
                name, state = line.split()
                if state.startswith(("down", "drain")):
                    self.site.slurm("scontrol", "update", f"nodename={name}", "state=resume")
            return {line.split()[1] for line in states} == {"idle"}

        wait_until(idle, 120)

    def write(self, trial: Trial) -> None:
        """Put a trial on record; others may be tried at the same time."""
        if not os.environ.get(RECORD):
            return
        file = Path(os.environ[RECORD])
        with locks.exclusive(file.with_suffix(".lock")):
            before = json.loads(file.read_text())["kills"] if file.is_file() else []
            kills = {kill["seed"]: kill for kill in before} | {trial.seed: {**vars(trial), "commit": commit()}}
            document = {
                "what": "kills at random moments of certify --on over two of four virtual hosts of Slurm "
                "(./dev soak tests/integration/test_slurm_soak.py -n 3)",
                "cases": ["gpt-fp32-baseline", *CASES],
                "undisturbed": self.expected,
                "machine": machine(),
                "kills": [kills[seed] for seed in sorted(kills)],
            }
            write_atomic(file, json.dumps(document, indent=2) + "\n")


@pytest.fixture(scope="module")
def soak(mini: Tool, mini_image: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    folder = tmp_path_factory.mktemp("soak")
    project, storage = folder / "project", folder / "storage"
    subprocess.run(["cp", "-al", mini.project, project], check=True)
    storage.mkdir()
    write_cluster(project, storage)
    runner = ranked_runner(folder)
    programs = slurm_programs(shared_folder(tmp_path_factory) / "slurm")
    with (
        pytest.MonkeyPatch.context() as patch,
        virtual_hosts(4) as hosts,
        slurm_cluster(programs, folder / "c", hosts=hosts, more=f"SlurmdTimeout={DOWN_SECONDS}\n") as cluster,
    ):
        patch.setattr(job, "smoke_file", lambda _store: runner)
        tool = Tool(project, mini.cache, {**mini.env, **cluster.environment})
        only = [word for case in CASES for word in ("--only", case)]
        command = ("certify", "--stack", STACK, "--target", "cpu", "--in", "sqsh", *only, "--fresh")
        site = Site(cluster, tool, storage, command, runner[0])
        soak = Soak(site, hosts, folder)
        began = time.monotonic()
        soak.expected = digest_of(site.certify("--json").stdout)
        soak.seconds = time.monotonic() - began
        assert soak.left() == {}
        yield soak


def kill_runner(soak: Soak, _choice: random.Random, rank: int = 0) -> str:
    while (running := soak.runner(rank)) is None and not soak.job_has_ended():
        time.sleep(0.1)
    if running is None:
        return ""
    host, pid = running
    os.kill(pid, signal.SIGKILL)
    return f"node {rank} of the run, on {host.name}"


def kill_agent(soak: Soak, choice: random.Random) -> str:
    return kill_runner(soak, choice, 1)


def kill_slurmd(soak: Soak, choice: random.Random) -> str:
    rank, seconds = choice.randrange(2), choice.choice(OUTAGES)
    if not (name := soak.node_of(rank)):
        return ""
    service = soak.site.cluster.nodes[name]
    service.end(signal.SIGKILL)
    time.sleep(seconds)
    service.start()
    return f"slurmd of {name}, node {rank} of the run, for {seconds:g} s"


def cut_network(soak: Soak, choice: random.Random) -> str:
    rank, seconds = choice.randrange(2), choice.choice(OUTAGES)
    if not (name := soak.node_of(rank)):
        return ""
    soak.host(name).connect(False)
    time.sleep(seconds)
    soak.host(name).connect(True)
    return f"the cable of {name}, node {rank} of the run, for {seconds:g} s"


def preempt(soak: Soak, _choice: random.Random) -> str:
    words = ("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--wrap", "sleep 600")
    urgent = soak.site.slurm(*words).strip()
    wait_until(lambda: soak.site.state(urgent) == "RUNNING", 120)
    soak.site.slurm("scancel", urgent)
    return "all nodes, for an urgent job"


KILLS: dict[str, Callable[[Soak, random.Random], str]] = {
    "agent": kill_agent,
    "runner": kill_runner,
    "slurmd": kill_slurmd,
    "network": cut_network,
    "preemption": preempt,
}


def to_its_end(soak: Soak, process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a command printed, and told; jobs that were put back begin once nothing of their last start is left."""
    limit, hurried = time.monotonic() + LIMIT_SECONDS, set[str]()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
        number = soak.job()
        shown = soak.site.slurm("scontrol", "show", "job", number)
        assert time.monotonic() < limit, f"the command hangs: {soak.left()}\n{shown}"
        restarts = re.findall(r"Restarts=\d+", shown)
        # A node that still runs the last start refuses the next one, and Slurm holds the job.
        if "Reason=BeginTime" in shown and hurried.isdisjoint(restarts) and not soak.left():
            soak.site.slurm("scontrol", "update", f"job={number}", "starttime=now+5seconds")
            hurried.update(restarts)


def sentences(told: str) -> list[str]:
    """What a person is told of the job, and of what went wrong."""
    lines = [line.strip() for line in told.splitlines()]
    return [line for line in lines if line.startswith(("job ", "error", "cause", "help", "Slurm"))]


@pytest.mark.parametrize("seed", SEEDS)
def test_verdicts_are_the_same_after_a_kill(soak: Soak, seed: int) -> None:
    choice = random.Random(seed)
    kill = sorted(KILLS)[seed % len(KILLS)]
    trial = Trial(seed, kill, round(choice.uniform(0.0, 0.3 * soak.seconds), 1))
    # Of a trial that failed.
    soak.site.cluster.end_jobs()
    soak.restore()
    began, before = time.monotonic(), soak.job()
    with soak.site.started("--json", results=False) as process:
        wait_until(lambda: soak.job() not in ("", before))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(trial.moment_seconds)
        if process.poll() is None:
            trial.hit = KILLS[kill](soak, choice)
        printed, told = to_its_end(soak, process)
    (soak.scratch / f"seed-{seed}.log").write_text(told)
    trial.statuses.append(process.returncode)
    trial.told = sentences(told)
    soak.restore()
    while trial.statuses[-1] != 0 and len(trial.statuses) <= MOST_RESUMES:
        done = soak.site.certify("--json", "--resume", status=None)
        (soak.scratch / f"seed-{seed}-{len(trial.statuses)}.log").write_text(done.stderr)
        trial.statuses.append(done.returncode)
        printed = done.stdout
    trial.verdicts = digest_of(printed) if trial.statuses[-1] == 0 else ""
    trial.seconds = round(time.monotonic() - began, 1)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: soak.left() == {}, 60)
    trial.left = soak.left()
    soak.write(trial)
    assert trial.hit
    assert (trial.verdicts, trial.left) == (soak.expected, {}), trial
