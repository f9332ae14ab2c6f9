"""The files that start a job: sbatch's script, and the environment definition (EDF) of sites that have those.

Pure: the same request gives the same text. Words that a user or a file chose are quoted here and nowhere else.
"""

from __future__ import annotations

import shlex

import tomlkit

from envbuild.catalog.cluster import JOB_ID, Mount
from envbuild.launch.slurm.job import (
    EDF,
    MARGIN_SECONDS,
    OUT_OF_TIME,
    REQUEUED,
    RUN_FOLDER,
    RUNNER,
    TOKENS,
    UNUSABLE,
    SlurmJob,
)

# Slurm sets both for each task: the job's number, and its node's place in the job.
NODE_NUMBER = "SLURM_NODEID"
OWN_VARIABLES = ("SLURM_JOB_ID", NODE_NUMBER)
_SCRIPT = """\
#!/bin/bash
# Written by `envbuild render`: the smoke runner on {nodes} {noun}, its results in {folder}.
{directives}
set -uo pipefail
# What the shell that submitted this had set is no part of the run: it would be seen in the container.
for name in $(compgen -e); do
    case $name in
    SLURM* | PATH | LD_LIBRARY_PATH | HOME | USER | LOGNAME | SHELL | LANG | TMPDIR | XDG_* | ENROOT_*) ;;
    *) unset "$name" ;;
    esac
done
{exports}
# The head of the run is the batch host; other nodes find its port in the run's folder.
head=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
# Slurm starts a job again when it does not reach a node, where processes of the last start may live on: they end when
# their token's file is gone.
token={tokens}$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
rm -f {tokens}*
(umask 077 && head -c 32 /dev/urandom | base64 -w 0 >"$token")
unset SLURM_TIME_FORMAT
ends_at=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e) {margin} seconds ago" +%s 2>/dev/null || true)
printf '{{"event": "job-started", "restarts": %s}}\\n' "${{SLURM_RESTART_COUNT:-0}}"
# A signal to this script interrupts `wait` alone.
trap 'kill -TERM "${{step:-}}" 2>/dev/null' TERM
{definition}
# A node that lacks one of these would be waited for in vain. A network file system shows a new file late.
if {copy}{check}
then
    # Each node's number is its place in this job; `--mpi=none`, as the runner's ranks find each other by themselves.
    {step} &
    step=$!
    # The step of a start that was replaced would wait for nodes that are others' now. `read` waits without a process.
    (
        exec {{timer}}<> <(:)
        while [ -e "$token" ]; do read -rt 5 -u "$timer"; done
        read -rt 60 -u "$timer"
        kill -KILL "$step"
    ) >/dev/null 2>&1 &
    watcher=$!
    wait "$step"
    status=$?
    [ "$status" -le 128 ] || {{ wait "$step"; status=$?; }}
    kill "$watcher" 2>/dev/null
else
    status={unusable}
    printf '{{"event": "exit", "node": 0, "status": %s}}\\n' "$status"
fi
{removal}
# A start that was replaced leaves the job to the next one.
job=$(scontrol show job "$SLURM_JOB_ID")
[[ $job == *" Restarts=${{SLURM_RESTART_COUNT:-0}} "* ]] || exit "$status"
# Preempted, its processes end politely, and Slurm would count the job as failed and not start it again.
if [[ $job =~ PreemptTime=[0-9] ]]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
{again}
exit "$status"
"""
# A task that ended early ends no other one; a task's processes may use every CPU of its node. The job's variables reach
# its steps also where a site wants sbatch --export=NONE.
_SRUN = ("srun", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--unbuffered")


def render_sbatch(job: SlurmJob) -> str:
    """The batch script of a job."""
    directives = [f"#SBATCH {line}" for line in job.directives]
    for directive in job.slurm.directives:
        directives += [f"# {directive.reason}", f"#SBATCH {directive.line}"]
    return _SCRIPT.format(
        nodes=job.nodes,
        noun="node" if job.nodes == 1 else "nodes",
        folder=job.folder,
        directives="\n".join(directives),
        exports="\n".join(f"export {name}={_word(value)}" for name, value in job.environment.items()),
        tokens=shlex.quote(f"{job.folder}/{TOKENS}"),
        margin=MARGIN_SECONDS,
        definition=_definition(job),
        copy=_copy(job),
        check=_check(job),
        unusable=UNUSABLE,
        again=_again(job),
        step=_step(job),
        removal=_removal(job),
    ).replace("\n\n", "\n")


def render_edf(job: SlurmJob) -> str:
    """The environment definition file of a job, for ``srun --environment=FILE``.

    Its format: https://docs.cscs.ch/software/container-engine/edf/
    """
    document = tomlkit.document()
    document["image"] = _expanded(job.image_on_node)
    document["mounts"] = [_expanded(_mount(mount)) for mount in job.mounts]
    document["workdir"] = "/"
    if job.environment:
        document["env"] = {name: _expanded(value) for name, value in job.environment.items()}
    if job.transport is not None and job.transport.annotations:
        document["annotations"] = dict(job.transport.annotations)
    return tomlkit.dumps(document)


def _definition(job: SlurmJob) -> str:
    if job.slurm.runtime != "edf":
        return ""
    # No line of TOML is the word EDF: strings have their line breaks written out.
    return f"cat >{shlex.quote(f'{job.folder}/{EDF}')} <<'EDF' || exit\n{render_edf(job)}EDF"


def _copy(job: SlurmJob) -> str:
    """Of the image, onto each node's own disk: many nodes that read one file of shared storage wait for each other."""
    folder = job.cluster.image.node_folder
    if folder is None:
        return ""
    # sbcast names the node, and no cause.
    failed = f"the image was not copied to {folder} of each node: it may be full, or not there"
    copy = f"sbcast --force {_word(job.image)} {_word(job.image_on_node)}"
    return f"{{ {copy} || {{ echo {shlex.quote(failed)} >&2; false; }}; }} &&\n    "


def _check(job: SlurmJob) -> str:
    """That every node has what it starts from, and the token that this job's first one wrote: all have one folder."""
    files = [f"{job.folder}/{RUNNER}", *([] if job.is_pulled else [job.image_on_node])]
    script = (
        'for file; do for _ in {1..70}; do [ -r "$file" ] && continue 2; sleep 1; done; '
        'echo "$SLURMD_NODENAME does not have $file: it must lie on storage that all nodes share" >&2; exit 1; done'
    )
    return _continued([" ".join(_SRUN), f"bash -c {shlex.quote(script)} -", *map(_word, files), '"$token"'])


def _removal(job: SlurmJob) -> str:
    if job.image_on_node == job.image:
        return ""
    # A node that is down does not answer.
    return f"timeout 60 srun --overlap --mpi=none rm -f {_word(job.image_on_node)}"


def _again(job: SlurmJob) -> str:
    if not job.requeues:
        return ""
    file = shlex.quote(f"{job.folder}/{REQUEUED}")
    return (
        "# Its time was over before the last case: what is left goes on in the same job, queued again.\n"
        f'if [ "$status" = {OUT_OF_TIME} ] && [ "$(cat {file} 2>/dev/null | wc -l)" -lt {job.requeues} ]; then\n'
        f'    date >>{file} && scontrol requeue "$SLURM_JOB_ID" && sleep 60\nfi'
    )


def _step(job: SlurmJob) -> str:
    opened = {"pyxis": _container, "bwrap": _opened, "edf": _defined}[job.slurm.runtime](job)
    lines = [
        " ".join(_SRUN),
        *map(_word, opened),
        f'bash -c {shlex.quote(_inside(job))} - "$head" "$ends_at" "${{token##*/}}"',
    ]
    return _continued(lines)


def _continued(lines: list[str]) -> str:
    return " \\\n    ".join(lines)


def _inside(job: SlurmJob) -> str:
    """What bash runs in the image on each node; its words are the head, when the job ends, and the token's file."""
    lines = []
    if job.is_pulled:
        # envbuild's own .sqsh name the image that they were made from, whoever pulled them.
        digest = job.image.rpartition("@")[2]
        lines += [
            "read -r first </etc/rc",
            f'[ "$first" = "# enroot-provenance: oci:{digest}" ] ||',
            '    { echo "this is not the image of the plan, or was not pulled by envbuild\'s importer" >&2; exit 3; }',
        ]
    transport = job.transport
    if transport is not None and transport.libraries:
        folders = shlex.quote(":".join(transport.libraries))
        lines.append(f"export LD_LIBRARY_PATH={folders}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    if transport is not None and transport.script is not None:
        lines.append(f". {shlex.quote(transport.script)} || exit")
        # The cluster's file has the last word.
        lines += [f"export {name}={_word(value)}" for name, value in job.environment.items()]
    # A node's number is its own, and the others are the batch script's.
    token = f'{RUN_FOLDER}/"$3"'
    own = f'--node-rank "${NODE_NUMBER}" --head "$1:0" --ends-at "$2" --token-file {token}'
    lines += [
        # Slurm signals the runner too.
        "trap : TERM",
        f"{shlex.join(job.runner_words)} {own}",
        "status=$?",
        # However node 0 ended, the others do not wait for it.
        f'[ "${NODE_NUMBER}" != 0 ] || rm -f {token}',
        'exit "$status"',
    ]
    return "\n".join(lines)


def _container(job: SlurmJob) -> list[str]:
    # Without a name: pyxis names the container pyxis_JOB.STEP then, mounts its .sqsh where it is set up to, and removes
    # it at the end. A named one stays on the node, and is entered in the image's place by whoever uses the name again.
    return [
        f"--container-image={job.image_on_node}",
        f"--container-mounts={','.join(map(_mount, job.mounts))}",
        "--no-container-mount-home",
        # An image's own variables win over the job's, unless they are named.
        *([f"--container-env={','.join(job.environment)}"] if job.environment else []),
    ]


def _opened(job: SlurmJob) -> list[str]:
    binds = [f"--bind={_mount(mount)}" for mount in job.mounts]
    # Inside, none of the job's variables is there but those named.
    names = [f"--env={name}" for name in (*job.environment, *OWN_VARIABLES)]
    gpus = ["--gpus"] if job.slurm.gpus_per_node else []
    opener = [str(job.slurm.python), "-m", "envbuild.launch.inside"]
    return [*opener, f"--image={job.image_on_node}", *binds, *names, *gpus, "--"]


def _defined(job: SlurmJob) -> list[str]:
    return [f"--environment={job.folder}/{EDF}"]


def _mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target or mount.source}" + (":ro" if mount.read_only else "")


def _word(text: str) -> str:
    """A word for the shell: quoted, but for the job's number."""
    return '"$SLURM_JOB_ID"'.join(shlex.quote(part) if part else "" for part in text.split(JOB_ID)) or "''"


def _expanded(text: str) -> str:
    """A string of an EDF, in which ${NAME} is a variable and $${NAME} is not."""
    return "${SLURM_JOB_ID}".join(part.replace("${", "$${") for part in text.split(JOB_ID))
