"""The files that start a job: sbatch's script, and the environment definition (EDF) of sites that have those.

Pure: the same request gives the same text. Words that a user or a file chose are quoted here and nowhere else.
"""

from __future__ import annotations

import shlex

import tomlkit

from envbuild.catalog.cluster import JOB_ID, Mount
from envbuild.launch.slurm.job import TOKEN, SlurmJob

# Slurm sets it for each task: its node's place in the job.
NODE_NUMBER = "SLURM_NODEID"
_SCRIPT = """\
#!/bin/bash
# Written by `envbuild render`: the smoke runner on {nodes} {noun}, its results in {folder}.
{directives}
set -uo pipefail
{exports}
# The head of the run is the batch host; other nodes find its port in the run's folder.
head=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
token={token}
[ -s "$token" ] || (umask 077 && head -c 32 /dev/urandom | base64 -w 0 >"$token")
ends_at=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || true)
{delivery}
# Each node's number is its place in this job; `--mpi=none`, as the runner's ranks find each other by themselves.
{step} &
step=$!
# A signal to this script interrupts `wait` alone.
trap 'kill -TERM "$step" 2>/dev/null' TERM
wait "$step"
status=$?
[ "$status" -le 128 ] || {{ wait "$step"; status=$?; }}
# Preempted, its processes end politely, and Slurm would count the job as failed and not start it again.
if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
"""


def render_sbatch(job: SlurmJob) -> str:
    """The batch script of a job."""
    directives = [f"#SBATCH {line}" for line in job.directives]
    for directive in job.slurm.directives:
        directives += [f"# {directive.reason}", f"#SBATCH {directive.line}"]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return _SCRIPT.format(
        nodes=job.nodes,
        noun="node" if job.nodes == 1 else "nodes",
        folder=job.folder,
        directives="\n".join(directives),
        exports="\n".join(exports),
        token=shlex.quote(f"{job.folder}/{TOKEN}"),
        delivery=_delivery(job),
        step=_step(job),
    ).replace("\n\n", "\n")


def _delivery(job: SlurmJob) -> str:
    if job.image_on_node == job.image:
        return ""
    copied = shlex.join(["sbcast", "--force", job.image, job.image_on_node])
    return (
        f"# Onto each node's own disk: many nodes that read one file of shared storage wait for each other.\n{copied}"
    )


def _step(job: SlurmJob) -> str:
    transport = job.cluster.transport
    inside = f". {shlex.quote(transport.script)} && " if transport is not None and transport.script else ""
    # A node's number is its own, and the other two are the batch script's.
    own = f'--node-rank "${NODE_NUMBER}" --head "$1:0" --ends-at "$2"'
    command = f"{inside}exec {shlex.join(job.runner_words)} {own}"
    opened = _opened(job) if job.slurm.runtime == "bwrap" else _container(job)
    start = ["srun", "--mpi=none", "--kill-on-bad-exit=0", "--unbuffered", *opened]
    return f'{" ".join(map(_word, start))} \\\n    bash -c {shlex.quote(command)} - "$head" "$ends_at"'


def _opened(job: SlurmJob) -> list[str]:
    binds = [word for mount in job.mounts for word in ("--bind", _mount(mount))]
    # Inside, none of the job's variables is there but those named.
    names = [word for name in (*job.environment, NODE_NUMBER) for word in ("--env", name)]
    gpus = ["--gpus"] if job.slurm.gpus_per_node else []
    opener = [str(job.slurm.python), "-m", "envbuild.launch.inside"]
    return [*opener, "--image", job.image_on_node, *binds, *names, *gpus, "--"]


def _container(job: SlurmJob) -> list[str]:
    return [
        f"--container-image={job.image_on_node}",
        f"--container-mounts={','.join(map(_mount, job.mounts))}",
        # A container that another job left under the name would be entered in the image's place.
        f"--container-name=envbuild-{JOB_ID}",
        "--no-container-mount-home",
        # An image's own variables win over the job's, unless they are named.
        *([f"--container-env={','.join(job.environment)}"] if job.environment else []),
    ]


def _word(text: str) -> str:
    """A word for the batch script: quoted, but for the job's number."""
    return '"$SLURM_JOB_ID"'.join(shlex.quote(part) if part else "" for part in text.split(JOB_ID)) or "''"


def _mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target or mount.source}" + (":ro" if mount.read_only else "")


def render_edf(job: SlurmJob) -> str:
    """The environment definition file of a job, for ``srun --environment=FILE``."""
    document = tomlkit.document()
    document["image"] = job.image_on_node
    document["mounts"] = [_mount(mount) for mount in job.mounts]
    document["workdir"] = "/"
    if job.environment:
        document["env"] = dict(job.environment)
    return tomlkit.dumps(document)
