"""A pool whose threads run programs ends at once when it is interrupted."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from helpers.processes import wait_until

from envbuild.core.background import interruptible, run_in_background
from envbuild.core.process import run


def interrupted(work: list[Callable[[], object]], threads: int, moment: Callable[[], object]) -> list[Future[object]]:
    """What became of a pool's work when the pool is interrupted after ``moment``."""
    futures: list[Future[object]] = []
    try:
        with interruptible(threads) as pool:
            futures = [pool.submit(one) for one in work]
            moment()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return futures


def ended(future: Future[object]) -> bool:
    """Whether the program of some work was ended by a signal, and not by itself."""
    return not future.cancelled() and "was ended by SIGTERM" in str(future.exception())


def test_interrupted_pool_ends_a_program_that_was_about_to_start():
    about, go = threading.Event(), threading.Event()

    def work() -> None:
        about.set()
        go.wait()
        run(["sleep", "3600"], what="sleep")

    def moment() -> None:
        about.wait()
        threading.Timer(0.2, go.set).start()

    (future,) = interrupted([work], 1, moment)
    assert ended(future)


def test_interrupted_pool_ends_programs_of_background_work_that_its_threads_began():
    began = threading.Event()

    def work() -> object:
        future = run_in_background(lambda: run(["sleep", "60"], what="sleep"))
        began.set()
        return future.result()

    (future,) = interrupted([work], 1, began.wait)
    assert ended(future)


def test_pool_that_fails_ends_its_programs_alone_and_one_around_it_ends_them_too(tmp_path):
    def inner(name: str, fails: bool) -> None:
        with interruptible(1) as pool:
            future = pool.submit(run, ["sh", "-c", f"touch {tmp_path}/{name}; exec sleep 60"], what="sleep")
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
            if fails:
                raise ValueError("a lock that fails")
            future.result()

    def moment() -> None:
        wait_until(failing.done)
        assert not other.done()

    try:
        with interruptible(2) as pool:
            failing, other = pool.submit(inner, "failing", fails=True), pool.submit(inner, "other", fails=False)
            moment()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert isinstance(failing.exception(), ValueError)
        assert ended(other)
