"""Which process a file or a lease names, and whether it still runs: process numbers are used again."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.digests import Json
from envbuild.core.text import printable

# Of a machine's name with its domain.
LONGEST_HOST = 253


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process of some machine.

    Attributes:
        started: in the machine's clock ticks; empty where it is not known.
        numbered_in: what gives the number its meaning: a start of a machine, and a namespace; empty: not known.
    """

    pid: int
    started: str
    numbered_in: str
    host: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """The one that runs this."""
        pid = os.getpid()
        return cls(pid=pid, started=_started(pid), numbered_in=numbering(), host=socket.gethostname())

    @classmethod
    def read(cls, record: Mapping[str, object]) -> ProcessIdentity | None:
        """The process that a record names; None where it names none."""
        pid, host = record.get("pid"), record.get("host")
        if not isinstance(pid, int) or not isinstance(host, str):
            return None
        return cls(
            pid=pid, started=str(record.get("started", "")), numbered_in=str(record.get("numbered_in", "")), host=host
        )

    def as_json(self) -> dict[str, Json]:
        return {"pid": self.pid, "started": self.started, "numbered_in": self.numbered_in, "host": self.host}

    @property
    def is_numbered_here(self) -> bool:
        """Whether its number means a process of this machine and container."""
        return self.numbered_in != "" and self.numbered_in == numbering()

    @property
    def has_ended(self) -> bool:
        """Whether it is known to run no more; another machine's never is."""
        if not self.is_numbered_here:
            return False
        try:
            # Signal 0 is not sent: only whether it could be is told (kill(2)).
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass  # another user's, of which /proc may show nothing; or no number of a process
        # Another process may have its number by now, and began at another time.
        return _started(self.pid) not in ("", self.started)

    def __str__(self) -> str:
        # Whoever may write the file may name any.
        return f"process {self.pid} of {printable(self.host):.{LONGEST_HOST}}"


def _started(pid: int) -> str:
    """When a process began (proc(5), field 22 of stat), "ended" for one that nobody waited for; empty: not known."""
    try:
        # Field 2, the name, may hold spaces and brackets. What follows the last one begins with field 3.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]


def numbering() -> str:
    """What numbers processes: this start of the machine, and the namespace; empty where it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
