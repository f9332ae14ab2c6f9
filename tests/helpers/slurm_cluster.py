"""Slurm with its own munge, on ports, sockets and folders of the tests, ended with the block."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.compiled import shared

from envbuild.core import locks

SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
# What they need and small systems lack.
PACKAGES = (*SLURM, "munge", "libmunge2", "libhwloc15", "liblz4-1", "libnuma1")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
READY_SECONDS = 60
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
PlugStackConfig={folder}/plugstack.conf
PluginDir={plugins}
{prolog}{nodes}PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP MaxTime=60 PriorityTier=2
"""
PROLOG = """\
Prolog={prolog}
Epilog={prolog}
PrologFlags=Alloc
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000\n"
# pyxis' option, for Slurm to hand on; nothing is run with it.
OPTION = """
struct option {
    const char *name, *argument, *usage;
    int has_argument, value;
    int (*callback)(int, const char *, int);
};
static int accept(int, const char *, int) { return 0; }
static option image = {"container-image", "PATH", "as pyxis has it", 1, 0, accept};
extern "C" {
int spank_option_register(void *, option *);
extern const char plugin_name[] = "pyxis", plugin_type[] = "spank";
extern const unsigned int plugin_version = SLURM_VERSION, spank_plugin_version = 1;
int slurm_spank_init(void *spank, int, char **) { return spank_option_register(spank, &image); }
}
"""


@dataclass(frozen=True)
class SlurmPrograms:
    """Where Slurm is, and the variables that its programs need."""

    environment: Mapping[str, str]
    plugins: Path
    slurmstepd: Path


def slurm_programs(folder: Path) -> SlurmPrograms:
    """This machine's Slurm and munge, else Debian's, unpacked without being installed: no service starts."""
    path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
    if all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "srun", "munged")):
        (plugins,) = Path("/usr/lib").glob("*/slurm-wlm")
        return SlurmPrograms({"PATH": path}, plugins, Path("/usr/sbin/slurmstepd"))
    with locks.exclusive(folder.with_suffix(".lock")):
        if not (folder / "complete").is_file():
            loading = folder / "download"
            loading.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=loading, check=True)
            for package in loading.glob("*.deb"):
                subprocess.run(["dpkg", "-x", package, folder], check=True)
            for name in ("slurmctld", "slurmd", "slurmstepd"):  # Debian's alternatives make these names
                (folder / "usr/sbin" / name).symlink_to(f"{name}-wlm")
            (folder / "complete").touch()
    (plugins,) = (folder / "usr/lib").glob("*/slurm-wlm")
    environment = {
        "PATH": f"{folder}/usr/sbin:{folder}/usr/bin:{path}",
        "LD_LIBRARY_PATH": f"{plugins}:{plugins.parent}",
    }
    return SlurmPrograms(environment, plugins, folder / "usr/sbin/slurmstepd")


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path
    programs: SlurmPrograms

    def run(self, *words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, as a user gives it."""
        environment = {**os.environ, **self.programs.environment, "SLURM_CONF": f"{self.folder}/slurm.conf", **more}
        return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait until none is left: their steps would outlive the nodes' daemons."""
        self.run("scancel", f"--user={getpass.getuser()}", cwd=self.folder)
        until = time.monotonic() + READY_SECONDS
        while self.run("squeue", "--noheader", cwd=self.folder).stdout.strip():
            assert time.monotonic() < until, "jobs do not end"
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(
    programs: SlurmPrograms, folder: Path, prolog: Path | None = None, *, nodes: int = 1
) -> Iterator[Cluster]:
    """Slurm of some virtual nodes n1, n2, ..., with pyxis' option --container-image.

    Args:
        prolog: of the site, which is its epilog too.
    """
    (folder / "munge").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge/key").write_bytes(secrets.token_bytes(128))
    (folder / "munge/key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as bound:
        free = [bound.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(nodes + 1)]
        controller, *ports = (each.getsockname()[1] for each in free)
    names = [f"n{number}" for number in range(1, nodes + 1)]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            controller=controller,
            nodes="".join(NODE.format(name=name, port=port) for name, port in zip(names, ports, strict=True)),
            user=user,
            prolog=PROLOG.format(prolog=prolog) if prolog else "",
            plugins=programs.plugins,
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    cluster = Cluster(folder, programs)
    version = cluster.run("scontrol", "--version", cwd=folder).stdout
    numbers = [int(number) for number in re.findall(r"\d+", version)][:3]
    plugin = shared(folder / "option.so", OPTION, f"-DSLURM_VERSION={int.from_bytes(bytes(numbers), 'big')}")
    (folder / "plugstack.conf").write_text(f"required {plugin}\n")
    munge = {name: f"{folder}/munge/{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")}
    with contextlib.ExitStack() as running:
        started = running.enter_context
        # By force: it wants a socket that every account reaches, and the folders of tests are closed.
        own = [f"--log-file={folder}/munge/log", *(f"--{name}={path}" for name, path in munge.items())]
        started(_program(cluster, "munged", "--foreground", "--force", *own))
        _wait_for(cluster, "munge", "--socket", munge["socket"], "--no-input")
        started(_program(cluster, "slurmctld", "-D"))
        for name in names:
            started(_program(cluster, "slurmd", "-D", "-N", name, "-d", str(programs.slurmstepd), log=f"slurmd-{name}"))
        _wait_for(cluster, "scontrol", "ping")
        try:
            yield cluster
        finally:
            cluster.end_jobs()


@contextlib.contextmanager
def _program(cluster: Cluster, *words: str, log: str = "") -> Iterator[None]:
    environment = {**os.environ, **cluster.programs.environment, "SLURM_CONF": f"{cluster.folder}/slurm.conf"}
    with (cluster.folder / f"{log or words[0]}.log").open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_for(cluster: Cluster, *words: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while (done := cluster.run(*words, cwd=cluster.folder)).returncode != 0:
        assert time.monotonic() < until, f"{words} failed: {done.stdout}{done.stderr}"
        time.sleep(0.1)
