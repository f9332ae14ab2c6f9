"""Changes what others may change at the same moment: it is written only if it is still what was read."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from envbuild.core.errors import NetworkError
from envbuild.store.backend import ObjectStore

SETTLE_SECONDS = 2.0


def change_settled(
    read: Callable[[], bytes | None], write: Callable[[], object], before: bytes | None, after: bytes
) -> bool:
    """Change ``before`` to ``after`` in a store without conditional writes, by Fischer's mutual exclusion.

    A writer looks, writes, waits, and looks again. It is sound where from the first look to the end of the write less
    time passes than the wait, so a write that took longer does not count.

    Returns:
        False where it is something else, or it took too long to be sure.
    """
    began = monotonic()
    if read() != before:
        return False
    write()
    if monotonic() - began > SETTLE_SECONDS:
        return False
    sleep(SETTLE_SECONDS)
    return read() == after


# How often an object is read and written again that others write meanwhile.
ATTEMPTS = 20


def change(
    objects: ObjectStore, path: str, new: bytes, changed: Callable[[bytes], bytes], *, at_most_bytes: int
) -> bytes:
    """Create an object, or change the one that is there; its content afterwards.

    Args:
        new: its content where there is none.
        changed: its new content out of the one that is there; the same one writes nothing.

    Raises:
        NetworkError: the store cannot be reached or refuses, or knows no conditional writes.
    """
    for _ in range(ATTEMPTS):
        there = objects.read(path, at_most_bytes)
        wanted = new if there is None else changed(there.content)
        if there is not None and wanted == there.content:
            return wanted
        if objects.create(path, wanted) if there is None else objects.replace(path, wanted, there):
            return wanted
        # Somebody else was first, or it was our own write, whose answer was lost: what is there now decides.
    raise NetworkError(
        f"{path} of {objects.address} cannot be written",
        why=f"Others changed it {ATTEMPTS} times meanwhile, or the store knows no conditional writes.",
        fix="Run the same command again. An S3 service must know If-Match and If-None-Match for PUT.",
    )
