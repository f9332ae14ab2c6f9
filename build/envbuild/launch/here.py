"""The launcher ``here``: the Python that ``python`` means on PATH."""

from __future__ import annotations

import shutil
from pathlib import Path

from envbuild.core.errors import CertificationCannotRunError
from envbuild.launch.executors import LaunchRequest
from envbuild.launch.python import NO_ENVIRONMENT, PythonExecutor


def open_executor(request: LaunchRequest) -> PythonExecutor:  # noqa: ARG001 - the protocol's
    """The environment of the command's own PATH.

    Raises:
        CertificationCannotRunError: there is no Python; reason ``no-environment``.
    """
    for name in ("python", "python3"):
        if program := shutil.which(name):
            return PythonExecutor(name="here", program=Path(program).absolute())
    raise CertificationCannotRunError(
        "there is no Python here",
        why="Neither python nor python3 is on PATH.",
        fix="Activate the environment first, or name it with --in venv --venv DIR.",
        reason=NO_ENVIRONMENT,
    )
