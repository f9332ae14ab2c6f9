"""Ends the runner of a node once its token's file is gone: node 0 has ended, or the run was started again elsewhere.

Slurm starts a job again when it does not reach one of its nodes, and what runs there goes on.
"""

import threading
import time
from pathlib import Path

POLL_SECONDS = 2.0


def start(token_file: Path, stop: threading.Event) -> None:
    """Set `stop` once there is no such file."""

    def watch() -> None:
        while not is_gone(token_file):
            time.sleep(POLL_SECONDS)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()


def is_gone(token_file: Path) -> bool:
    """Return whether there is no such file; one that cannot be looked for may be there."""
    try:
        token_file.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
