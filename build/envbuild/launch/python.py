"""Runs tasks with a Python of this machine, without an image."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import CertificationFailedError
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.launch.executors import UNBUFFERED, Task

NO_ENVIRONMENT = "no-environment"


@dataclass(frozen=True, kw_only=True)
class PythonExecutor:
    """Starts an interpreter of this machine, with the variables of this process and this machine's network.

    Differences from the lock (another package found first, say) are found by the runner.
    """

    name: str
    program: Path

    @property
    def python(self) -> str:
        return str(self.program)

    def joins(self) -> bool:
        # Its tasks end with this process.
        return False

    def forget(self) -> None:
        """Nothing: a run here leaves nothing elsewhere."""

    def run(self, task: Task) -> Finished:
        places = [str(path.resolve()) for path in (task.plan, task.runner, task.results)]
        return run(
            task.words(self.python, plan=places[0], runner=places[1], results=places[2]),
            what=f"train the cases with {self.program}",
            on_line=task.on_line,
            log=task.log,
            check=False,
            options=ProcessOptions(
                env={**os.environ, **UNBUFFERED},
                cwd=task.results,
                timeout_seconds=task.timeout_seconds,
                error=CertificationFailedError,
            ),
        )
