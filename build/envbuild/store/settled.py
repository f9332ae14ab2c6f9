"""Changes what several writers change in a store without conditional writes: Fischer's mutual exclusion.

A writer looks, writes, waits, and looks again. It is sound where from the first look to the end of the write less time
passes than the wait, so a write that took longer does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

SETTLE_SECONDS = 2.0


def change_settled(
    read: Callable[[], bytes | None], write: Callable[[], object], before: bytes | None, after: bytes
) -> bool:
    """Change ``before`` to ``after``; False where it is something else, or it took too long to be sure."""
    began = monotonic()
    if read() != before:
        return False
    write()
    if monotonic() - began > SETTLE_SECONDS:
        return False
    sleep(SETTLE_SECONDS)
    return read() == after
