"""The launcher ``venv``: the Python of a virtual environment of this machine."""

from __future__ import annotations

import os

from envbuild.core.errors import CertificationCannotRunError
from envbuild.launch.executors import LaunchRequest
from envbuild.launch.python import NO_ENVIRONMENT, PythonExecutor


def open_executor(request: LaunchRequest) -> PythonExecutor:
    """The virtual environment in a folder.

    Raises:
        CertificationCannotRunError: there is no environment; reason ``no-environment``.
    """
    program = request.venv / "bin/python"
    if not os.access(program, os.X_OK):
        raise CertificationCannotRunError(
            f"there is no virtual environment in {request.venv}",
            why=f"{program} does not exist, or may not be executed.",
            fix="Make it (`envbuild sync --into DIR`), or name another one with --venv DIR.",
            reason=NO_ENVIRONMENT,
        )
    # absolute() and not resolve(): a venv is found by the path of its link, and the target is the system's Python.
    return PythonExecutor(name="venv", program=program.absolute())
