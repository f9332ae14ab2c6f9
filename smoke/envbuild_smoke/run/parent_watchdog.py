"""Ends the runner once its standard input is closed, so once the program that started it has ended.

A container does not end with the client that started it; docker closes its standard input then.
"""

import os
import threading
import time
from contextlib import suppress

# The content is ignored: only the end of the stream counts.
_CHUNK = 4096


def start(stop: threading.Event, status: int, *, grace_seconds: float) -> None:
    """Set `stop` at the end of standard input; exit with `status` if the process lives on after the grace period."""

    def watch() -> None:
        # A stream that cannot be read counts as closed.
        with suppress(OSError):
            while os.read(0, _CHUNK):
                pass
        stop.set()
        # The main thread may not check the event: it hashes a file, or hangs.
        time.sleep(grace_seconds)
        # Not sys.exit, which would end this thread alone.
        os._exit(status)

    threading.Thread(target=watch, daemon=True).start()
