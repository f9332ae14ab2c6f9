"""Opens the executor that runs the cases of a job; it is tried before work starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from envbuild.certify.run.job import CertifyJob, CertifyRequest
from envbuild.core.errors import CertificationCannotRunError, MachineError, UsageError
from envbuild.core.progress import Reporter
from envbuild.launch import launchers
from envbuild.launch.executors import Executor, LaunchRequest, OnCluster, settings_of

# Of a run's folder.
RESULTS_DIR = "results"
DEFAULT_VENV = Path(".venv")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options of the command line about the machine.

    Attributes:
        runtime: how the .sqsh is opened; the best that works here when None.
        venv: the virtual environment of ``--in venv``.
        gpus: the indices of the GPUs that may be used; all when empty.
        isolation: whether rank processes stay alive between cases; the runner's default when None.
        requeues: how often a cluster's job is queued again when its time limit comes before the last case.
        job: the cluster's job to follow and judge; None: the run's own, or a new one.
    """

    runtime: str | None = None
    venv: Path = DEFAULT_VENV
    gpus: tuple[int, ...] = ()
    isolation: str | None = None
    requeues: int = 0
    job: str | None = None

    def arguments(self) -> tuple[str, ...]:
        """The options of the runner's command line."""
        words = ("--gpus", ",".join(map(str, self.gpus))) if self.gpus else ()
        return (*words, *(("--isolation", self.isolation) if self.isolation else ()))


def parse_gpus(text: str) -> tuple[int, ...]:
    """``0,1`` as numbers.

    Raises:
        UsageError: it is not a list of different numbers.
    """
    words = [word.strip() for word in text.split(",")]
    # isdecimal() alone is true of the digits of other scripts, too.
    if not all(word.isdecimal() and word.isascii() for word in words) or len({*map(int, words)}) != len(words):
        raise UsageError(
            f"--gpus {text!r} is not a list of GPUs",
            why="A list is whole numbers with commas between them, each once.",
            fix="Give their indices as nvidia-smi shows them: --gpus 0,1",
        )
    return tuple(int(word) for word in words)


def open_executor(job: CertifyJob, machine: MachineOptions, reporter: Reporter) -> Executor:
    """The executor of a job.

    Raises:
        CertificationCannotRunError: this machine has no driver, no runtime or no such environment.
    """
    place = job.request.place
    request = LaunchRequest(
        form=place.form,
        image=job.request.image,
        on_gpus=job.on_gpus,
        extra=settings_of(os.environ, on_gpus=job.on_gpus),
        results=job.folder / "run" / RESULTS_DIR,
        runtime=machine.runtime,
        venv=machine.venv,
        reporter=reporter,
        on_cluster=_on_cluster(job.request, machine),
    )
    try:
        return launchers.open_executor(place.launcher, request)
    except MachineError as error:
        raise CertificationCannotRunError(
            error.what, why=error.why, fix=error.fix, log=error.log, reason="no-runtime"
        ) from error


def _on_cluster(request: CertifyRequest, machine: MachineOptions) -> OnCluster | None:
    if request.cluster is None or request.place.launcher not in launchers.ON_CLUSTER:
        return None
    return OnCluster(
        name=request.cluster,
        cluster=request.selection.catalog.cluster(request.cluster),
        nodes=request.wanted.nodes,
        requeues=machine.requeues,
        job=machine.job,
    )
