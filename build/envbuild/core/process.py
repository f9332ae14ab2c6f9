"""The one place that runs other programs.

Argument lists, never shell strings; a process group of its own, killed as a group on a timeout or an interrupt;
output streamed to a log file and to whoever shows progress.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

from envbuild.core.errors import BuildError, EnvbuildError, InternalError, MachineError, disk_full
from envbuild.core.exit_status import describe_status, full_disk, mask, ran_out_of_space, tail
from envbuild.core.files import machine_errors
from envbuild.core.orphans import POLL_SECONDS, Orphans
from envbuild.core.spawn import started_program, watched


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A program that ended: its exit status (negative: the signal that ended it), output and wall time."""

    status: int
    output: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How a program is run, and how its failure is reported.

    Attributes:
        env: the complete environment; the current one when None.
        stdin: bytes to feed, or a file descriptor to read from; /dev/null when None.
        whole: its children end with it, and all of them when this process dies, however it dies. What it, or a program
            that it waits for, left running with its output open is ended, and the output says so.
        error: the class of error of a non-zero exit status, or of running past ``timeout_seconds``.
        working_on: the place the program writes to; if its disk is full the error says so instead.
    """

    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    stdin: bytes | int | None = None
    timeout_seconds: float | None = None
    whole: bool = False
    error: type[EnvbuildError] = BuildError
    fix: str = ""
    working_on: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """What a program whose output is read as a stream may take.

    Attributes:
        memory_bytes: the most that it may have (RLIMIT_AS); what reads other people's files needs a limit.
        idle_seconds: how long it may work without printing anything.
    """

    memory_bytes: int | None = None
    idle_seconds: float | None = None


DEFAULTS = ProcessOptions()
NO_LIMITS = StreamLimits()


def find_tool(name: str, package: str) -> Path:
    """The path of program ``name``, looked up on PATH and in the system's sbin folders.

    Raises:
        MachineError: it is not installed; names the Debian/Ubuntu ``package`` that has it.
    """
    # Debian gives ordinary accounts a PATH without the sbin folders, and some tools are there (login.defs, ENV_PATH).
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    program = shutil.which(name, path=path)
    if program is None:
        raise MachineError(
            f"the program {name} is not installed",
            why=f"{name} was looked for on PATH and in the sbin folders.",
            fix=f"Install it: apt-get install {package}",
        )
    return Path(program)


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    options: ProcessOptions = DEFAULTS,
) -> Finished:
    """Run a program to its end and return what it printed (stdout and stderr together).

    Args:
        what: what is being done, for error messages: ``"resolve stack mcore"``.
        log: file that receives the whole output, appended to.
        on_line: called with each line of output as it comes, without its newline.
        check: raise ``options.error`` on a non-zero exit status.

    Raises:
        options.error: the program failed or ran past ``timeout_seconds``.
        MachineError: the program cannot be started, or the disk is full.
    """
    command = [str(word) for word in argv]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(_open_log(log, command)) if log is not None else None
        limit = _Limit(command, started, options.timeout_seconds)
        try:
            with (
                started_program(command, what, options.env, options.cwd, options.stdin) as process,
                watched(process, whole=options.whole),
            ):
                output = _drain(process, _Output(sink, on_line), limit, options)
        except subprocess.TimeoutExpired as expired:
            raise options.error(
                f"cannot {what}: {Path(command[0]).name} ran longer than {options.timeout_seconds:.0f} s",
                why=f"The command was: {mask(shlex.join(command))}",
                fix=options.fix or "See the log for where it stopped, then run again.",
                log=log,
            ) from expired
    seconds = time.monotonic() - started
    if check and process.returncode != 0:
        if options.working_on is not None and ran_out_of_space(output, options.working_on):
            raise disk_full(full_disk(output, options.working_on))
        raise options.error(
            f"cannot {what}: {Path(command[0]).name} {describe_status(process.returncode)}",
            why=tail(output) or f"It printed nothing. The command was: {mask(shlex.join(command))}",
            fix=options.fix,
            log=log,
        )
    return Finished(status=process.returncode, output=output, seconds=seconds)


def _open_log(log: Path, command: list[str]) -> FileIO:
    with machine_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, so that a full disk shows while writing and never when the file is closed.
        sink = log.open("ab", buffering=0)
        # File names among the arguments may be no UTF-8.
        sink.write(f"$ {mask(shlex.join(command))}\n".encode(errors="surrogateescape"))
    return sink


def stream(
    argv: Sequence[str | Path],
    *,
    what: str,
    error: type[EnvbuildError] = BuildError,
    fix: str = "",
    statuses: Collection[int] = (0,),
    limits: StreamLimits = NO_LIMITS,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> Generator[bytes]:
    """A program's standard output in pieces; closing the generator ends it.

    Messages are read from standard error, and asked for in English whatever the user's locale is.

    Args:
        statuses: exit statuses that are no failure.
        env: the environment; this process's when None.
        stdin: a file descriptor to read from; /dev/null when None.

    Raises:
        error: it failed, which shows after the last piece.
        MachineError: it cannot be started.
    """
    command = [str(word) for word in argv]
    if limits.memory_bytes is not None:
        # Not by preexec_fn, which may deadlock in a process with threads (Python's documentation of subprocess).
        command = [str(find_tool("prlimit", "util-linux")), f"--as={limits.memory_bytes}", *command]
    env = {**(os.environ if env is None else env), "LC_ALL": "C"}
    with (
        # A file, since a second pipe would fill and block the program while only the first one is read.
        tempfile.TemporaryFile() as messages,
        started_program(command, what, env, None, stdin, messages.fileno()) as process,
    ):
        if process.stdout is None:
            raise InternalError("a program was started without a pipe for its output")
        output = process.stdout.fileno()
        while True:
            if not select.select([output], [], [], limits.idle_seconds)[0]:
                why = f"It printed nothing for {limits.idle_seconds:.0f} s, and was ended."
                raise error(f"cannot {what}: {Path(argv[0]).name} does not come to an end", why=why, fix=fix)
            piece = os.read(output, 1 << 18)
            if not piece:
                break
            yield piece
        status = process.wait()
        messages.seek(0)
        output_text = messages.read().decode(errors="replace")
    if status not in statuses:
        raise error(
            f"cannot {what}: {Path(argv[0]).name} {describe_status(status)}",
            why=tail(output_text) or f"It printed no message. The command was: {mask(shlex.join(command))}",
            fix=fix,
        )


def answer(argv: Sequence[str | Path], *, what: str, statuses: Collection[int] = (0,)) -> str:
    """What a program prints on standard output alone, without warnings such as of a missing locale.

    Raises:
        MachineError: it failed, or cannot be started.
    """
    return b"".join(stream(argv, what=what, error=MachineError, statuses=statuses)).decode(errors="replace").strip()


class _Output:
    """What a program prints: kept whole, appended to the log, handed on line by line."""

    def __init__(self, sink: FileIO | None, on_line: Callable[[str], None] | None) -> None:
        self._sink = sink
        self._on_line = on_line
        self._chunks: list[bytes] = []
        self._pending = b""

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        if self._sink is not None:
            with machine_errors(Path(self._sink.name)):
                self._sink.write(chunk)
        if self._on_line is not None:
            # Progress bars go back to the start of their line with a carriage return.
            *lines, self._pending = (self._pending + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))

    def note(self, text: str) -> None:
        """A line of envbuild's own."""
        self.add(f"envbuild: {text}\n".encode())

    def end(self) -> str:
        if self._on_line is not None and self._pending:
            self._on_line(self._pending.decode(errors="replace"))
        return b"".join(self._chunks).decode(errors="replace")


def _drain(process: subprocess.Popen[bytes], output: _Output, limit: _Limit, options: ProcessOptions) -> str:
    """Feed the program's standard input and read all output until it ends."""
    if process.stdout is None:
        raise InternalError("a program was started without a pipe for its output")
    # Fed and read in one loop: a program that waits for its output to be read does not read its input meanwhile.
    # subprocess.communicate() does the same, and shows nothing before the end.
    feed = memoryview(options.stdin if isinstance(options.stdin, bytes) else b"")
    orphans = Orphans(process, output.note) if options.whole else None
    poll_seconds = POLL_SECONDS if orphans is not None else None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if process.stdin is not None:
            # pipe(7): else a write waits until all of it fits.
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = [key.fileobj for key, _ in selector.select(timeout=limit.left(at_most=poll_seconds))]
            if orphans is not None and orphans.are_all(anything=bool(ready)):
                break
            if process.stdin is not None and process.stdin in ready:
                feed = _feed(process.stdin, feed)
                if not feed:
                    selector.unregister(process.stdin)
                    process.stdin.close()
            if process.stdout in ready:
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if chunk:
                    output.add(chunk)
                else:
                    selector.unregister(process.stdout)
    limit.wait(process)
    return output.end()


class _Limit:
    def __init__(self, command: list[str], started: float, seconds: float | None) -> None:
        self._command = command
        self._seconds = seconds
        self._end = started + (seconds or 0.0)

    def left(self, at_most: float | None = None) -> float | None:
        """Seconds that are left, None for no limit; TimeoutExpired when none are."""
        if self._seconds is None:
            return at_most
        left = self._end - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(self._command, self._seconds)
        return left if at_most is None else min(left, at_most)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a program whose output has ended: nearly always that is now."""
        # A tenth of a second at least: one that has closed its output is about to end.
        process.wait(timeout=None if self._seconds is None else max(0.1, self._end - time.monotonic()))


def _feed(pipe: IO[bytes], data: memoryview) -> memoryview:
    """Write what the pipe takes now; returns the rest, nothing when the program no longer reads."""
    try:
        return data[os.write(pipe.fileno(), data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]
