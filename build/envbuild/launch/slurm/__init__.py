"""The launcher ``slurm``: a job is a frozen request, a pure rendering of it, and commands that submit and follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envbuild.launch.executors import LaunchRequest
    from envbuild.launch.slurm.executor import SlurmExecutor


def open_executor(request: LaunchRequest) -> SlurmExecutor:
    """The executor of a job; see :func:`envbuild.launch.slurm.executor.open_executor`."""
    # Nodes import this package too, for one module of it.
    from envbuild.launch.slurm import executor

    return executor.open_executor(request)
