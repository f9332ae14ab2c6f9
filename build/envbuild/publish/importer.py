"""Notes of the importer for enroot's hook: which step of which job got a verified image.

Little is imported here, as in ``follow``: every node of a job runs it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from envbuild.core.files import machine_errors, remove_tree, write_atomic
from envbuild.store.local import temporary_store

BATCH_STEP = "batch"
# Folders of jobs that began longer ago go at the next use: no step of them starts any more.
KEPT_SECONDS = 14 * 24 * 3600


def note_step(sqsh: Path) -> None:
    """Note that the step of a Slurm job may start an image: ``jobs/JOB/STEP`` holds the path of its .sqsh.

    A job that is requeued keeps its number, and its steps begin with 0 again: ``jobs/JOB/STEP.RESTART``.

    Outside of a job nothing is noted. The hook that reads it is ``containers/enroot/hook.sh``.
    """
    # A batch script has no step of a number: sbatch --container-image=....
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID") or BATCH_STEP
    if restart := os.environ.get("SLURM_RESTART_COUNT"):
        step = f"{step}.{restart}"
    # The job's user sets these: neither may lead out of the folder.
    if not job.isdecimal():
        return
    folder = temporary_store().root / "jobs"
    with machine_errors(folder):
        for old in folder.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > KEPT_SECONDS:
                    remove_tree(old)
        write_atomic(folder / job / Path(step).name, f"{sqsh}\n", mode=0o600)
