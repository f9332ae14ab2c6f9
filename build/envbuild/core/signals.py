"""Signals that wait until something is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that Python handles come when the block is done: a program must not start without being known.

    A signal mask would do it too, and the program would inherit it.
    """
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handled = {}  # Python handles signals in the main thread alone
    for number in handled:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for which, frame in came:
            handled[signal.Signals(which)](which, frame)
