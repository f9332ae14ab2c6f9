"""What people see while work goes on: a live display on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from envbuild.core.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PLAIN_INTERVAL_SECONDS = 15.0
# Escape sequences (ECMA-48) and other control characters: what tools print is not what a log or a display can show.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]")


def _shown(text: str) -> str:
    return _CONTROL.sub("", text).strip()


class Reporter(Protocol):
    """Receives what happens. Steps nest by being opened inside one another."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def update(self, text: str) -> None:
        """What the current step is doing right now; replaced by the next one."""

    def step(self, title: str) -> contextlib.AbstractContextManager[None]:
        """A piece of work: its title while it runs, its time when it is done."""


class SilentReporter:
    """Shows nothing (``--quiet``, and tests)."""

    def note(self, text: str) -> None:  # noqa: ARG002
        return

    def update(self, text: str) -> None:  # noqa: ARG002
        return

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:  # noqa: ARG002
        yield


class PlainReporter:
    """One line an event, for logs and CI: no escape codes, updates at most every 15 seconds.

    Args:
        of: what all lines are about, where several things are done at once.
    """

    def __init__(self, of: str = "") -> None:
        self._last = time.monotonic()
        self._title = ""
        self._of = f"[{of}] " if of else ""

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the stream is closed or full; the work goes on
            # One write: lines of threads do not run into each other.
            sys.stderr.write(f"{self._of}{printable_lines(text)}\n")
            sys.stderr.flush()

    def update(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL_SECONDS:
            self._last = now
            self.note(f"  {self._title}: {_shown(text)[:160]}")

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        outer, self._title = self._title, title
        self._last = started = time.monotonic()
        self.note(f"* {title} ...")
        try:
            yield
        except BaseException:
            self.note(f"  {title}: stopped after {time.monotonic() - started:.1f} s")
            raise
        finally:
            self._title = outer
        self.note(f"  {title}: done in {time.monotonic() - started:.1f} s")


class RichReporter:
    """A spinner with the current activity on a terminal, and a line with its time for each finished step."""

    def __init__(self) -> None:
        from rich.console import Console

        # highlight: rich would colour numbers and addresses in messages by itself.
        self._console: Console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._titles: list[str] = []

    def note(self, text: str) -> None:
        # Without markup: rich would take "[...]" in messages for styles.
        self._console.print(printable_lines(text), markup=False)

    def update(self, text: str) -> None:
        if self._status is not None and self._titles:
            self._status.update(self._line(_shown(text)))

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        started, title = time.monotonic(), printable(title)
        # Rich shows one live display at a time: inner steps change the text of the outer one.
        self._titles.append(title)
        if self._status is None:
            self._status = self._console.status(self._line(""))
            self._status.start()
        else:
            self._status.update(self._line(""))
        done = False
        try:
            yield
            done = True
        finally:
            self._titles.pop()
            if not self._titles and self._status is not None:
                self._status.stop()
                self._status = None
            elif self._status is not None:
                self._status.update(self._line(""))
            seconds = time.monotonic() - started
            mark, style = ("done", "green") if done else ("stopped", "red")
            from rich.text import Text

            self._console.print(Text.assemble((f"{mark:>8} ", style), title, (f"  {seconds:.1f} s", "dim")))

    def _line(self, activity: str) -> str:
        from rich.markup import escape

        width = max(20, self._console.width - 8)
        title = self._titles[-1] if self._titles else ""
        text = f"{title}: {activity}" if activity else title
        return escape(text[:width])


def choose_reporter(quiet: bool) -> Reporter:
    """The reporter for this process: silent when asked, rich on a terminal, plain lines elsewhere."""
    if quiet:
        return SilentReporter()
    return RichReporter() if sys.stderr.isatty() else PlainReporter()
