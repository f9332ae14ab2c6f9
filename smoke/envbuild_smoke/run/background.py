"""Work that takes longer than a node may be silent."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def result_of(work: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """Return what `work` returns, which a thread does while `meanwhile` is called, which waits a little."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        running = threads.submit(work)
        while not running.done():
            meanwhile()
        return running.result()
