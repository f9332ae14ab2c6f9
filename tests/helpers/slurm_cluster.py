"""Slurm with its own munge, on ports, sockets and folders of the tests, ended with the block."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from helpers.compiled import shared
from helpers.processes import wait_until
from helpers.services import READY_SECONDS, SEARCHED, Service, has_programs, unpacked
from helpers.slurm_accounting import ACCOUNTING, accounting
from helpers.virtual_hosts import GATEWAY, Host

SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
# What they need and small systems lack.
PACKAGES = (*SLURM, "munge", "libmunge2", "libhwloc15", "liblz4-1", "libnuma1")
LOOPBACK = "127.0.0.1"
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost({address})
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
{more}{prolog}{nodes}PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP MaxTime=60 PriorityTier=2
"""
PROLOG = """\
Prolog={prolog}
Epilog={prolog}
PrologFlags=Alloc
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} CPUs=8 RealMemory=1000\n"
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
    """This machine's Slurm and munge, else Debian's."""
    if has_programs("slurmctld", "slurmd", "srun", "munged"):
        (plugins,) = Path("/usr/lib").glob("*/slurm-wlm")
        return SlurmPrograms({"PATH": SEARCHED}, plugins, Path("/usr/sbin/slurmstepd"))
    programs = ("slurmctld", "slurmd", "slurmstepd")
    unpacked(folder, PACKAGES, {f"usr/sbin/{name}": f"{name}-wlm" for name in programs})
    (plugins,) = (folder / "usr/lib").glob("*/slurm-wlm")
    environment = {
        "PATH": f"{folder}/usr/sbin:{folder}/usr/bin:{SEARCHED}",
        "LD_LIBRARY_PATH": f"{plugins}:{plugins.parent}",
    }
    return SlurmPrograms(environment, plugins, folder / "usr/sbin/slurmstepd")


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path
    programs: SlurmPrograms
    # Of each node, its slurmd.
    nodes: dict[str, Service] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its users."""
        return {**self.programs.environment, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def run(self, *words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, as a user gives it."""
        environment = {**os.environ, **self.environment, **more}
        return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait until none is left: their steps would outlive the nodes' daemons."""
        self.run("scancel", f"--user={getpass.getuser()}", cwd=self.folder)
        wait_until(lambda: not self.run("squeue", "--noheader", cwd=self.folder).stdout.strip(), READY_SECONDS)


@contextlib.contextmanager
def slurm_cluster(
    programs: SlurmPrograms,
    folder: Path,
    prolog: Path | None = None,
    *,
    nodes: int = 1,
    hosts: Sequence[Host] = (),
    keeps_accounts: Path | None = None,
    more: str = "",
) -> Iterator[Cluster]:
    """Slurm of some virtual nodes n1, n2, ..., with pyxis' option --container-image.

    Args:
        prolog: of the site, which is its epilog too.
        hosts: those that the nodes are on; else all are this machine.
        keeps_accounts: with slurmdbd and MariaDB, which are in this folder.
        more: lines of slurm.conf.
    """
    places = {host.name: (host.address, host.words) for host in hosts}
    places = places or {f"n{number}": (LOOPBACK, ()) for number in range(1, nodes + 1)}
    addresses = {name: address for name, (address, _) in places.items()}
    configuration = _configure(folder, programs, addresses, PROLOG.format(prolog=prolog) if prolog else "", more)
    cluster = Cluster(folder, programs)
    munge = {name: f"{folder}/munge/{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")}
    with contextlib.ExitStack() as running:

        def service(*words: str | Path, log: str) -> Service:
            started = Service(words, cluster.environment, folder / f"{log}.log")
            started.start()
            running.callback(started.end)
            return started

        def answers(*words: str) -> bool:
            return cluster.run(*words, cwd=folder).returncode == 0

        # By force: it wants a socket that every account reaches, and the folders of tests are closed.
        own = [f"--log-file={folder}/munge/log", *(f"--{name}={path}" for name, path in munge.items())]
        munged = service("munged", "--foreground", "--force", *own, log="munged")
        munged.wait_until(lambda: answers("munge", "--socket", munge["socket"], "--no-input"))
        if keeps_accounts is not None:
            database = accounting(
                keeps_accounts, folder / "accounting", munge["socket"], programs.plugins, cluster.environment
            )
            port = running.enter_context(database)
            configuration.write_text(ACCOUNTING.format(port=port, munge=munge["socket"]) + configuration.read_text())
            assert cluster.run("sacctmgr", "--immediate", "add", "cluster", "tests", cwd=folder).returncode == 0
        slurmctld = service("slurmctld", "-D", log="slurmctld")
        for name, (_, before) in places.items():
            words = ("slurmd", "-D", "-N", name, "-d", programs.slurmstepd)
            cluster.nodes[name] = service(*before, *words, log=f"slurmd-{name}")
        slurmctld.wait_until(lambda: answers("scontrol", "ping"))
        try:
            yield cluster
        finally:
            cluster.end_jobs()


def _configure(folder: Path, programs: SlurmPrograms, addresses: Mapping[str, str], prolog: str, more: str) -> Path:
    """Write what Slurm and munge read, for nodes at these addresses; slurm.conf."""
    (folder / "munge").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge/key").write_bytes(secrets.token_bytes(128))
    (folder / "munge/key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as bound:
        free = [bound.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(len(addresses) + 1)]
        controller, *ports = (each.getsockname()[1] for each in free)
    each_node = zip(addresses.items(), ports, strict=True)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder,
            address=LOOPBACK if LOOPBACK in addresses.values() else GATEWAY,
            controller=controller,
            nodes="".join(NODE.format(name=name, address=each, port=port) for (name, each), port in each_node),
            user=user,
            prolog=prolog,
            more=more,
            plugins=programs.plugins,
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    version = Cluster(folder, programs).run("scontrol", "--version", cwd=folder).stdout
    numbers = [int(number) for number in re.findall(r"\d+", version)][:3]
    plugin = shared(folder / "option.so", OPTION, f"-DSLURM_VERSION={int.from_bytes(bytes(numbers), 'big')}")
    (folder / "plugstack.conf").write_text(f"required {plugin}\n")
    return configuration
