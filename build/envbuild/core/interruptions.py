"""Interruptions that stay what they are.

Python raises KeyboardInterrupt between any two instructions, so also between the closing of a descriptor and the note
that it is closed. Libraries that clean up then close it again (shutil.rmtree does), and what comes out is an OSError
about a bad file descriptor, with the interruption behind it. Others keep of it nothing but its name in a text: pydantic
does, while it makes a class.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

# By which a thread ends the work of the main one.
_OWN_SIGNAL = signal.SIGUSR1
_came: list[int] = []


def interrupt(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - a signal handler
    """The handler of a signal that ends the work: remembers that it came, and raises KeyboardInterrupt."""
    _came.append(number)
    raise KeyboardInterrupt


def has_come() -> bool:
    """Whether such a signal came in this process."""
    return bool(_came)


def is_interruption(error: BaseException) -> bool:
    """Whether an error was raised while a KeyboardInterrupt was on its way out."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        # Chains of errors may lead back to themselves.
        if one is None or id(one) in seen:
            continue
        if isinstance(one, KeyboardInterrupt):
            return True
        seen.add(id(one))
        # `raise ... from None` hides a context on purpose: what it replaced was handled.
        pending += [one.__cause__, None if one.__suppress_context__ and one.__cause__ is None else one.__context__]
    return False


def refuse_hidden_interruption(error: Exception) -> None:
    """Raise KeyboardInterrupt where ``error`` hides one."""
    if is_interruption(error):
        raise KeyboardInterrupt from error


@contextlib.contextmanager
def interruptions_kept() -> Iterator[None]:
    """What an interruption of the block ends with is a KeyboardInterrupt, whatever its cleaning up raised.

    Raises:
        KeyboardInterrupt: there was one behind the error.
    """
    try:
        yield
    except Exception as error:
        refuse_hidden_interruption(error)
        raise


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Gives what ends the block from another thread, as Ctrl-C would; it does nothing for a block of another thread.

    It must not be called after the block.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield lambda: None
        return
    before = signal.signal(_OWN_SIGNAL, interrupt)
    try:
        # A signal, and not only KeyboardInterrupt: it ends waiting, too.
        yield lambda: signal.pthread_kill(main.ident or 0, _OWN_SIGNAL)
    finally:
        signal.signal(_OWN_SIGNAL, before)
        # Only this block was to end.
        _came[:] = [number for number in _came if number != _OWN_SIGNAL]


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that Python handles come when the block is done: a program must not start without being known.

    A signal mask would do it too, and the program would inherit it.
    """
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, _OWN_SIGNAL)}
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
