"""Runs tasks with a Python of this machine, without an image: that of a virtual environment, or the one on PATH."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import CertificationCannotRunError, CertificationFailedError
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.launch.executors import UNBUFFERED, Task, Where

NO_ENVIRONMENT = "no-environment"


@dataclass(frozen=True, kw_only=True)
class PythonExecutor:
    """Starts an interpreter of this machine, with the variables of this process and this machine's network.

    Differences from the lock (another package found first, say) are found by the runner.
    """

    where: Where
    program: Path

    @property
    def name(self) -> str:
        return self.where

    @property
    def python(self) -> str:
        return str(self.program)

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


def venv_executor(folder: Path) -> PythonExecutor:
    """The virtual environment in a folder.

    Raises:
        CertificationCannotRunError: there is no environment; reason ``no-environment``.
    """
    program = folder / "bin/python"
    if not os.access(program, os.X_OK):
        raise CertificationCannotRunError(
            f"there is no virtual environment in {folder}",
            why=f"{program} does not exist, or may not be executed.",
            fix="Make it (`envbuild sync --into DIR`), or name another one with --venv DIR.",
            reason=NO_ENVIRONMENT,
        )
    # absolute() and not resolve(): a venv is found by the path of its link, and the target is the system's Python.
    return PythonExecutor(where="venv", program=folder.absolute() / "bin/python")


def path_executor() -> PythonExecutor:
    """The Python that ``python`` means on PATH.

    Raises:
        CertificationCannotRunError: there is no Python; reason ``no-environment``.
    """
    for name in ("python", "python3"):
        if found := shutil.which(name):
            return PythonExecutor(where="here", program=Path(found).absolute())
    raise CertificationCannotRunError(
        "there is no Python here",
        why="Neither python nor python3 is on PATH.",
        fix="Activate the environment first, or name it with --in venv --venv DIR.",
        reason=NO_ENVIRONMENT,
    )
