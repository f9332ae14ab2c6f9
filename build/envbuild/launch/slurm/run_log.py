"""The log of a job's steps, line by line while it grows, and what it says about the job's last start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from envbuild.core import jsonread
from envbuild.launch.slurm.run_folder import RunFolder


@dataclass(kw_only=True)
class RunLog:
    """Reads what is new.

    Attributes:
        name: of the file in the run's folder.
        on_line: called with each line.
        lines: of the job's last start; Slurm may have started it before, and the file has all.
        status: the runner's own exit status, of node 0; None while it runs, and when it was killed.
    """

    folder: RunFolder
    name: str
    on_line: Callable[[str], None]
    lines: list[str] = field(default_factory=list)
    status: int | None = None
    _offset: int = 0

    def read(self) -> None:
        """Read the whole lines that came since the last call."""
        data = self.folder.read_from(self.name, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            event = jsonread.loads(line)
            if event["event"] == "job-started":
                self.lines.clear()
                self.status = None
            elif event["event"] == "exit" and event["node"] == 0:
                self.status = int(event["status"])
        self.lines.append(line)
        self.on_line(line)
