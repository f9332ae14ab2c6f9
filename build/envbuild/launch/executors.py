"""What is run, and the interface of what runs it: a launcher opens an executor, which runs tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from envbuild.catalog.cluster import Cluster
from envbuild.core.errors import InternalError
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.image.output import PlacedImage

# What of an image is certified; ``none``: an environment without an image, whose certificate is about its lock. Docker
# runs the OCI form: the digest of its manifest is the one that is certified.
Form = Literal["sqsh", "oci", "none"]
# Where the files of a task are seen inside an image.
PLAN, RUNNER, RESULTS = "/envbuild/plan/plan.json", "/envbuild/plan/smoke.pyz", "/envbuild/results"
IMAGE_DIR = "/envbuild/image"
# What the runner prints is shown while it comes.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
# Settings of the communication libraries that decide what is measured.
COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "NVTE_", "CUDA_")
# The instruction sets of oneDNN and torch.
INSTRUCTIONS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
# They name interfaces and folders of this machine; inside an image there is loopback alone.
LEFT_OUT = ("NCCL_SOCKET_IFNAME", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The smoke runner with a plan.

    Attributes:
        plan: the plan's file.
        runner: the runner's file, a zipapp.
        results: the folder that it writes to.
        arguments: more words of its command line.
        on_line: called with each line that the runner prints.
        joins: it is to be followed; see :meth:`Executor.joins`.
    """

    plan: Path
    runner: Path
    results: Path
    arguments: tuple[str, ...] = ()
    on_line: Callable[[str], None] | None = None
    log: Path | None = None
    timeout_seconds: float | None = None
    joins: bool = False

    def words(self, python: str, *, plan: str, runner: str, results: str, image: str = "") -> list[str]:
        """The command line, with the files as they are called where it runs."""
        hashed = ["--image", image] if image else []
        return [python, runner, "run", "--plan", plan, "--out", results, *hashed, *self.arguments]

    def words_inside(self, python: str, image: str) -> list[str]:
        """The command line inside an image."""
        return self.words(python, plan=PLAN, runner=RUNNER, results=RESULTS, image=image)


@dataclass(frozen=True, kw_only=True)
class OnCluster:
    """The cluster that a task runs on, and how.

    Attributes:
        requeues: how often its job is queued again when its time limit comes before the last case.
        job: the one to follow; None: the run's own, or a new one.
    """

    name: str
    cluster: Cluster
    nodes: int = 1
    requeues: int = 0
    job: str | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What a launcher is to run, and the options of the machine.

    Attributes:
        form: the form of the image that it opens; ``none`` without one.
        image: None without one.
        on_gpus: whether tasks need the machine's GPUs.
        extra: variables of this machine that reach an image.
        results: the folder that its tasks write to.
        runtime: how a .sqsh is opened; the best that works here when None.
        venv: the virtual environment of the launcher ``venv``.
        on_cluster: for the launchers of clusters.
    """

    form: Form
    image: PlacedImage | None
    on_gpus: bool
    extra: Mapping[str, str]
    results: Path
    runtime: str | None
    venv: Path
    reporter: Reporter
    on_cluster: OnCluster | None = None

    def require_image(self) -> PlacedImage:
        """The image, which every form but ``none`` has.

        Raises:
            InternalError: there is none.
        """
        if self.image is None:
            raise InternalError("there is no image to certify")
        return self.image


class Executor(Protocol):
    """Runs tasks in one place."""

    @property
    def name(self) -> str:
        """What certificates call it."""

    @property
    def python(self) -> str:
        """The interpreter, as it is called there."""

    def joins(self) -> bool:
        """Whether a run goes on without this process, or ended without it, and is to be followed and not begun."""

    def forget(self) -> None:
        """Remove what an interrupted run left where it ran: another one begins."""

    def run(self, task: Task) -> Finished:
        """Run a task to its end and return its exit status, whatever that is.

        Raises:
            CertificationFailedError: the task ran past its time limit.
            EnvbuildError: the task could not be started.
        """


def settings_of(environ: Mapping[str, str], *, on_gpus: bool) -> dict[str, str]:
    """The variables of this machine that reach an image: how the libraries in it communicate, or compute on the CPU."""
    prefixes = COMMUNICATION if on_gpus else INSTRUCTIONS
    return {name: value for name, value in environ.items() if name.startswith(prefixes) and name not in LEFT_OUT}
