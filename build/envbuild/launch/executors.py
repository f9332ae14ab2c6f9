"""What is run, and where it can be run: one class a way, all with the same interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from envbuild.core.process import Finished

# Where the cases train: in an image, in one of its forms, or in an environment that is in none.
Where = Literal["sqsh", "oci", "docker", "venv", "here"]
WITHOUT_IMAGE = ("venv", "here")
# Where the files of a task are seen inside an image.
PLAN, RUNNER, RESULTS = "/envbuild/plan/plan.json", "/envbuild/plan/smoke.pyz", "/envbuild/results"
IMAGE_DIR = "/envbuild/image"
# What the runner prints is shown while it comes.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
# Settings of the communication libraries that decide what is measured.
COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "NVTE_", "CUDA_")
# They name interfaces of this machine; inside an image there is loopback alone.
NOT_HANDED_ON = ("NCCL_SOCKET_IFNAME", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The smoke runner with a plan.

    Attributes:
        plan: the plan's file.
        runner: the runner's file, a zipapp.
        results: the folder that it writes to.
        arguments: more words of its command line.
        on_line: is called with each line that it prints.
    """

    plan: Path
    runner: Path
    results: Path
    arguments: tuple[str, ...] = ()
    on_line: Callable[[str], None] | None = None
    log: Path | None = None
    timeout_seconds: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, python: str, *, plan: str, runner: str, results: str, image: str = "") -> list[str]:
        """The command line, with the files as they are called where it runs."""
        hashed = ["--image", image] if image else []
        return [python, runner, "run", "--plan", plan, "--out", results, *hashed, *self.arguments]

    def words_inside(self, python: str, image: str) -> list[str]:
        """The command line inside an image."""
        return self.words(python, plan=PLAN, runner=RUNNER, results=RESULTS, image=image)


class Executor(Protocol):
    """A way to run tasks."""

    @property
    def name(self) -> str:
        """What certificates call it."""

    @property
    def python(self) -> str:
        """The interpreter, as it is called there."""

    def variables(self) -> Mapping[str, str]:
        """The variables that a task sees there, as far as they are known before it runs."""

    def run(self, task: Task) -> Finished:
        """Run a task to its end; a status other than 0 is the caller's to judge.

        Raises:
            CertificationFailedError: it ran past its time limit.
            EnvbuildError: it could not be started.
        """


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this machine's environment reaches an image on GPUs: settings of the communication libraries."""
    return {
        name: value for name, value in environ.items() if name.startswith(COMMUNICATION) and name not in NOT_HANDED_ON
    }
