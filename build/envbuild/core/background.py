"""Work in background threads, whose programs are ended with it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from envbuild.core.spawn import kill_group, running, thread_state

T = TypeVar("T")


@contextlib.contextmanager
def interruptible(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads run programs: when the block is left by an exception, the programs are ended first.

    Ctrl-C reaches the main thread alone, which would otherwise wait for them to end by themselves.
    """
    # A program belongs to its block and those around it; programs of other blocks go on.
    block, outer = object(), getattr(thread_state, "blocks", ())
    pool = ThreadPoolExecutor(threads, initializer=lambda: setattr(thread_state, "blocks", (*outer, block)))
    try:
        yield pool
    except BaseException:
        # First what has not begun: a thread whose program is ended takes the next piece of work at once.
        pool.shutdown(wait=False, cancel_futures=True)
        # shutdown() waits for the threads, and they wait for their programs: it runs in a thread next to the loop that
        # ends those.
        ending = threading.Thread(target=pool.shutdown, name="wait for the pool", daemon=True)
        ending.start()
        while ending.is_alive():
            # Each time anew: one may have been about to start.
            for program in [program for program, blocks in list(running.items()) if block in blocks]:
                kill_group(program)
            ending.join(0.05)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Background(Future[T]):
    """Work that goes on in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._programs: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def runs(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Note a program of this work while the block runs."""
        with self._guard:
            self._programs.add(process)
            stopped = self._stopped
        try:
            if stopped:
                kill_group(process)
            yield
        finally:
            with self._guard:
                self._programs.discard(process)

    def stop(self) -> None:
        """End the program that it runs, and any that it starts later: what it does with that does not matter."""
        with self._guard:
            self._stopped = True
            programs = list(self._programs)
        for process in programs:
            kill_group(process)


def run_in_background(action: Callable[[], T]) -> Background[T]:
    """Run something in a daemon thread: it ends with the process, if not before."""
    # Not a ThreadPoolExecutor: Python joins the threads of executors at exit, so that Ctrl-C would wait for a server
    # that does not answer.
    future: Background[T] = Background()
    blocks: tuple[object, ...] = getattr(thread_state, "blocks", ())

    def work() -> None:
        # started_program() reads them: stop() and `interruptible` find programs that are started far below the action.
        thread_state.work, thread_state.blocks = future, blocks
        try:
            future.set_result(action())
        except BaseException as failure:  # noqa: BLE001 - result() raises it
            future.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()
    return future
