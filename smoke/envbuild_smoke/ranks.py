"""The runner's side of the template process: starts it, has ranks forked, hears of their ends."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild_smoke.plan import Device
from envbuild_smoke.rank import DEFAULT_ENTRY, common_environment

# How long the template may take to end once its stdin is closed; while it imports, it does not look there.
_END_SECONDS = 2.0


class TemplateError(Exception):
    """The libraries cannot be imported, or the template process died."""


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """What a rank runs ("module:function") and the modules imported before it is forked."""

    entry: str = DEFAULT_ENTRY
    preload: tuple[str, ...] = ()


class Template:
    """A running template process."""

    def __init__(self, program: RankProgram, device: Device, log: Path) -> None:
        command = [
            sys.executable,
            *_interpreter_options(),
            str(entry_point()),
            "template",
            "--entry",
            program.entry,
        ]
        for module in program.preload:
            command += ["--preload", module]
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **common_environment(device)},
                # Ctrl-C in a terminal reaches the whole foreground group; killing is the runner's decision.
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read_events, daemon=True).start()

    def _read_events(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._events.put(json.loads(line))
        # The stream ends with the process: whoever waits for an event must not wait on.
        self._events.put({"event": "gone"})

    def next_event(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the next event, or None when none came in time."""
        try:
            return self._events.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def start_ranks(self, command: dict[str, Any]) -> None:
        """Have ranks forked; a "started" and "exit" events follow."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write((json.dumps(command) + "\n").encode())
                self._process.stdin.flush()
        except BrokenPipeError as error:
            raise TemplateError("the process that ranks are forked from is gone") from error

    def close(self) -> None:
        """End the template and whatever ranks it still has."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a rank and everything it started; if nothing of it is left, do nothing."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Between its fork and its setsid a rank answers to its pid alone.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_rank(pid: int, number: int) -> None:
    """Send a signal to a rank alone, not to what it started; if it is gone, do nothing."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_leftovers(pid: int) -> None:
    """Kill what a rank that has ended left behind in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def entry_point() -> Path:
    """Return what Python has to run to get this very smoke: the zipapp, or the folder of the sources."""
    return zipapp_path() or Path(__file__).resolve().parent.parent


def zipapp_path() -> Path | None:
    """Return the zipapp this module was loaded from, or None when it comes from files."""
    archive = getattr(__spec__.loader, "archive", None) if __spec__ else None
    return Path(archive).resolve() if archive else None


def _interpreter_options() -> list[str]:
    """Return the options that decide which packages are found, as this interpreter was started with."""
    flags = sys.flags
    return [
        option
        for option, given in (
            ("-I", flags.isolated),
            ("-E", flags.ignore_environment),
            ("-s", flags.no_user_site),
        )
        if given
    ]
