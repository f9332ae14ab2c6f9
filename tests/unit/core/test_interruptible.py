"""A pool whose threads run programs ends at once when it is interrupted."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.processes import wait_until

from envbuild.core.background import interruptible
from envbuild.core.errors import BuildError
from envbuild.core.process import ProcessOptions, run


def interrupted_after(work: list[Callable[[], object]], threads: int, moment: Callable[[], object]) -> float:
    """How long a pool with this work takes to end when it is interrupted after ``moment``; in seconds."""
    begun = None
    try:
        with interruptible(ThreadPoolExecutor(threads)) as pool:
            for one in work:
                pool.submit(one)
            moment()
            begun = time.monotonic()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert begun is not None
        return time.monotonic() - begun


@pytest.mark.parametrize("threads", [1, 3])
def test_interrupted_pool_ends_its_programs_and_begins_no_other(tmp_path, threads):
    """A thread whose program is ended would take the next piece of work, and nobody would end that."""

    def work(number: int) -> Callable[[], object]:
        words = ["sh", "-c", f"touch {tmp_path}/{number}; exec sleep 30"]
        return lambda: run(words, what="sleep", options=ProcessOptions(error=BuildError))

    def started() -> int:
        return len(list(tmp_path.iterdir()))

    took = interrupted_after(
        [work(number) for number in range(12)], threads, lambda: wait_until(lambda: started() == threads)
    )
    assert took < 5
    assert started() == threads


def test_interrupted_pool_ends_a_program_that_was_about_to_start():
    about, go = threading.Event(), threading.Event()

    def work() -> None:
        about.set()
        go.wait()
        run(["sleep", "30"], what="sleep", options=ProcessOptions(error=BuildError))

    def moment() -> None:
        about.wait()
        threading.Timer(0.5, go.set).start()

    assert interrupted_after([work], 1, moment) < 5


def test_pool_that_is_interrupted_at_once_ends_at_once():
    def work() -> None:
        run(["sleep", "30"], what="sleep", options=ProcessOptions(error=BuildError))

    assert interrupted_after([work] * 12, 3, lambda: None) < 5
