"""The README of a plan for another machine: how to run it there, and how to judge its results."""

from __future__ import annotations

import shlex

from envbuild.certify.run.job import CertifyJob
from envbuild.image.output import OUT_DIR
from envbuild.launch.executors import Form

# Every image has it, empty.
MOUNT_POINT = "/envbuild"
# Not in the folder of the plan: a mount leaves an empty file of mode 0000 there, which cp and tar then fail on.
MOUNTED_SQSH = "/mnt/image.sqsh"


def judge_command(job: CertifyJob, folder: str) -> str:
    """The command that judges a plan's results."""
    request = job.request
    selection = request.selection
    words = ["envbuild", "certify", "--stack", selection.stack_name, "--base", selection.base_name]
    words += ["--target", selection.target_name, "--matrix", request.matrix_name]
    words += ["--name", request.lock_name] if request.lock_name else []
    words += [word for case in request.wanted.only for word in ("--only", case)]
    words += ["--max-gpus", str(request.wanted.max_gpus)] if request.wanted.max_gpus is not None else []
    words += ["--run-known-wrong"] if request.run_known_wrong else []
    words += ["--on", request.cluster] if request.cluster else []
    words += ["--nodes", str(request.wanted.nodes)] if request.wanted.nodes > 1 else []
    words += ["--out-dir", str(request.out_dir)] if request.out_dir != OUT_DIR else []
    return f"{shlex.join(words)} --judge {folder}"


def readme(job: CertifyJob) -> str:
    """How to run the plan, and what to bring back."""
    request, subject = job.request, job.subject
    what = f"{subject.stack} on {subject.base} for {subject.target}, lock {subject.lock_digest}"
    lines = [f"- {form}: `{digest}`" for form, digest in subject.image_digests.items()]
    needs = job.ranks
    device = f"{needs} GPUs of the target" if job.on_gpus else "a CPU"
    return _README.format(
        what=what,
        digests="\n".join(["", *lines]) if lines else "",
        device=device,
        cases=len(job.cases),
        commands=_COMMANDS[request.place.form].format(
            python=request.image.record.python if request.image else "python",
            folder=MOUNT_POINT,
            sqsh=MOUNTED_SQSH,
            request=f", --gpus-per-node={needs}" if job.on_gpus else "",
            gpus=" --gpus all --ulimit memlock=-1" if job.on_gpus else "",
            digest=subject.oci_digest,
        ),
        judge=judge_command(job, "DIR"),
    )


_README = """\
# A certification plan

For {what}.{digests}

It trains {cases} cases and needs {device}. Nothing but this folder and what is certified is needed there: `smoke.pyz`
runs with the standard library and with what is under test. Results go to `results/`.

```sh
cd DIR        # this folder, where the cases run
{commands}```

More options may follow: `--gpus 0,1` for the GPUs to use, as many as it needs, `--isolation process` for a new process
for every case, and `--resume` to go on with a run that was interrupted. The exit status is 0 when all cases completed
and 1 when some did not; both leave results, and the judge decides whether they agree. 2: the options or the plan are
wrong. 3: the environment cannot run it. 4: the GPUs are not as the plan wants. 5: the results cannot be written. 130:
interrupted.

Bring back `plan.json`, `results/results.jsonl` and, for the logs, `results/cases/`, as they are: `results/checkpoints/`
and `results/caches/` are large and of no more use. Then, anywhere:

```sh
{judge}
```

Results of one run of this plan can be certified; others are refused then. For another run write another plan.
"""
# The image's file is mounted into the image so that the runner can hash it. A home folder, which pyxis may mount, can
# bring another Python (planted fault another-python-in-the-image).
_ENROOT = """\
SQSH=/path/to/image.sqsh
# With enroot:
enroot start --mount "$PWD:{folder}" --mount "$SQSH:{sqsh}" "$SQSH" \\
    {python} {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {sqsh}
# Or under Slurm with pyxis; add what the partition asks for (--partition, --time{request}):
srun --nodes=1 --ntasks=1 --no-container-mount-home --container-image="$SQSH" \\
    --container-mounts="$PWD:{folder},$SQSH:{sqsh}" \\
    {python} {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {sqsh}
"""
# --ipc host: docker's own 64 MiB of shared memory are too few for NCCL. memlock: NCCL pins memory.
_DOCKER = """\
# The image by its digest, as its registry has it
docker run --rm{gpus} --network none --ipc host -v "$PWD:{folder}" --entrypoint {python} REGISTRY/NAME@{digest} \\
    {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {folder}/manifest.json
"""
_PYTHON = """\
# With the Python of the environment that is certified
python smoke.pyz run --plan plan.json --out results
"""
_COMMANDS: dict[Form, str] = {"sqsh": _ENROOT, "oci": _DOCKER, "none": _PYTHON}
