"""Where an environment is put together: on this machine, or inside a sandboxed root file system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envbuild.core.errors import MachineError
from envbuild.core.process import Finished


class InconclusiveError(MachineError):
    """A program did not come to its own end: what it was asked stays unknown."""


class RunCommand(Protocol):
    """Runs an argument list in a place and returns what came of it, failed or not.

    A program that runs past its time is ended with InconclusiveError.
    """

    def __call__(
        self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None
    ) -> Finished: ...


@dataclass(frozen=True, kw_only=True)
class InstallTarget:
    """Paths as they are seen from the place, and the way to run something there.

    Attributes:
        uv: the uv program.
        lock: the folder with the lock's requirement files.
        python: the interpreter that the environment is made from.
        venv: the environment.
        run: runs something there.
        disk: a path of this machine on the disk that the environment is written to.
        logs: the folder of this machine for the log of each step.
        logs_seen: the same folder as it is seen from the place; empty where it is seen under its own name.
    """

    uv: str
    lock: str
    python: str
    venv: str
    run: RunCommand
    disk: Path
    logs: Path
    logs_seen: str = ""

    @property
    def venv_python(self) -> str:
        """The environment's own interpreter."""
        return f"{self.venv}/bin/python"
