"""Standard input as a lifeline: whoever started the runner holds its other end, and lets go of it by dying.

A container does not end with the program that asked for it; docker closes its standard input then.
"""

import os
import threading
import time
from contextlib import suppress

# Bytes that come are of no interest: only that no more can come.
_CHUNK = 4096


def hold(stop: threading.Event, status: int, *, grace_seconds: float, descriptor: int = 0) -> None:
    """Set `stop` once the descriptor is at its end; where that does not end the process in time, exit with `status`."""

    def watch() -> None:
        # One that cannot be read holds nobody.
        with suppress(OSError):
            while os.read(descriptor, _CHUNK):
                pass
        stop.set()
        # The main thread may be where no event is looked at: hashing a file, or stuck.
        time.sleep(grace_seconds)
        os._exit(status)

    threading.Thread(target=watch, daemon=True).start()
