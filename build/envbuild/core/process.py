"""The one place that runs other programs.

Argument lists, never shell strings; a process group of its own, killed as a group on a timeout or an interrupt;
output streamed to a log file and to whoever shows progress.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import IO, TypeVar

from envbuild.core.errors import BuildError, EnvbuildError, InternalError, MachineError, disk_full
from envbuild.core.files import machine_errors, space_is_low
from envbuild.core.leftovers import POLL_SECONDS, Leftovers

T = TypeVar("T")

KILL_GRACE_SECONDS = 3.0
TAIL_LINES = 30
# util-linux; without this a program outlives a killed envbuild and goes on writing into a staging directory.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
_CREDENTIALS = re.compile(r"://[^/@\s'\"]+@")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A program that ended: its exit status (negative: the signal that ended it), output and wall time."""

    argv: tuple[str, ...]
    status: int
    output: str
    seconds: float


def find_tool(name: str, package: str) -> Path:
    """The path of program ``name``, looked up on PATH and in the system's sbin folders.

    Raises:
        MachineError: it is not installed; names the Debian/Ubuntu ``package`` that has it.
    """
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise MachineError(
            f"the program {name} is not installed",
            why=f"{name} was looked for on PATH and in the sbin folders.",
            fix=f"Install it: apt-get install {package}",
        )
    return Path(found)


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float | None = None,
    on_line: Callable[[str], None] | None = None,
    stdin: bytes | int | None = None,
    check: bool = True,
    error: type[EnvbuildError] = BuildError,
    fix: str = "",
    working_on: Path | None = None,
    whole: bool = False,
) -> Finished:
    """Run a program to its end and return what it printed (stdout and stderr together).

    Args:
        what: what is being done, for error messages: ``"resolve stack mcore"``.
        log: file that receives the whole output, appended to.
        env: the complete environment; the current one when None.
        on_line: called with each line of output as it comes, without its newline.
        stdin: bytes to feed, or a file descriptor to read from; /dev/null when None.
        check: raise ``error`` on a non-zero exit status.
        whole: its children end with it, and all of them when this process dies, however it dies. What it, or a program
            that it waits for, left running with its output open is ended, and the output says so.
        working_on: the place the program writes to; if its disk is full the error says so instead.

    Raises:
        error: the program failed or ran past ``timeout_seconds``.
        MachineError: the program cannot be started, or the disk is full.
    """
    command = [str(word) for word in argv]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        sink = None
        if log is not None:
            with machine_errors(log):
                log.parent.mkdir(parents=True, exist_ok=True)
                # Without a buffer, so that a full disk shows while writing and never when the file is closed.
                sink = stack.enter_context(log.open("ab", buffering=0))
                sink.write(f"$ {mask(shlex.join(command))}\n".encode(errors="surrogateescape"))
        feed = stdin if isinstance(stdin, bytes) else b""
        try:
            with _started(command, what, env, cwd, stdin) as process, _watched(process, whole=whole):
                output = _drain(process, _Output(sink, on_line), feed, started, timeout_seconds, whole=whole)
        except subprocess.TimeoutExpired as expired:
            raise error(
                f"cannot {what}: {Path(command[0]).name} ran longer than {timeout_seconds:.0f} s",
                why=f"The command was: {mask(shlex.join(command))}",
                fix=fix or "See the log for where it stopped, then run again.",
                log=log,
            ) from expired
    seconds = time.monotonic() - started
    finished = Finished(argv=tuple(command), status=process.returncode, output=output, seconds=seconds)
    if check and finished.status != 0:
        if working_on is not None and ran_out_of_space(output, working_on):
            raise disk_full(working_on)
        raise error(
            f"cannot {what}: {Path(command[0]).name} {describe_status(finished.status)}",
            why=tail(output) or f"It printed nothing. The command was: {mask(shlex.join(command))}",
            fix=fix,
            log=log,
        )
    return finished


@contextlib.contextmanager
def _started(
    command: list[str], what: str, env: Mapping[str, str] | None, cwd: Path | None, stdin: bytes | int | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running program; when the block is left by an exception, it is ended with all its children."""
    process: subprocess.Popen[bytes] | None = None
    work: Beside[object] | None = getattr(_here, "work", None)
    try:
        with _signals_wait():
            process = _start(command, what, env, cwd, stdin)
            _running.add(process)
        with work.runs(process) if work is not None else contextlib.nullcontext():
            yield process
    except BaseException:
        if process is not None:
            kill_group(process)
        raise
    finally:
        if process is not None:
            _running.discard(process)
            # Closed last: a program that is being ended may still print.
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
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


def _start(
    command: list[str], what: str, env: Mapping[str, str] | None, cwd: Path | None, stdin: bytes | int | None
) -> subprocess.Popen[bytes]:
    program = shutil.which(command[0], path=(env or os.environ).get("PATH"))
    try:
        if program is None:
            raise FileNotFoundError(2, "no such program, or it may not be executed")
        return subprocess.Popen(
            [*_prefix(), program, *command[1:]],
            stdin=_stdin(stdin),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as failure:
        raise MachineError(
            f"cannot {what}: {command[0]} does not start",
            why=failure.strerror or str(failure),
            fix="Check that the program is installed and may be executed.",
        ) from failure


def ran_out_of_space(output: str, path: Path) -> bool:
    """Whether a program failed for a full disk: it said so (it may have cleaned up since), or little space is left."""
    return os.strerror(errno.ENOSPC) in output or space_is_low(path)


def _stdin(stdin: bytes | int | None) -> int:
    if stdin is None:
        return subprocess.DEVNULL
    return stdin if isinstance(stdin, int) else subprocess.PIPE


@cache
def _prefix() -> tuple[str, ...]:
    found = shutil.which(DIE_WITH_PARENT[0])
    return (found, *DIE_WITH_PARENT[1:]) if found else ()


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


@contextlib.contextmanager
def _watched(process: subprocess.Popen[bytes], *, whole: bool) -> Iterator[None]:
    """End a program's whole group with the block, and when this process dies in it: then a pipe closes.

    The kernel's own way (PR_SET_PDEATHSIG) reaches the program alone, and none of its children.
    """
    if not whole:
        yield
        return
    script = 'read -r line || kill -s KILL -- "-$1"'
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            watcher.communicate(b"\n")


def _drain(
    process: subprocess.Popen[bytes],
    output: _Output,
    stdin: bytes,
    started: float,
    timeout_seconds: float | None,
    *,
    whole: bool = False,
) -> str:
    """Feed ``stdin`` and read all output until the program ends."""
    if process.stdout is None:
        raise InternalError("a program was started without a pipe for its output")
    feed = memoryview(stdin)
    limit = _Limit(process, started, timeout_seconds)
    left = Leftovers(process, output.note) if whole else None

    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = [
                key.fileobj for key, _ in selector.select(timeout=limit.left(at_most=POLL_SECONDS if whole else None))
            ]
            if left is not None and left.are_all(anything=bool(ready)):
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
    limit.wait()
    return output.end()


class _Limit:
    """The time that a program may take."""

    def __init__(self, process: subprocess.Popen[bytes], started: float, seconds: float | None) -> None:
        self._process = process
        self._seconds = seconds
        self._end = started + (seconds or 0.0)

    def left(self, at_most: float | None = None) -> float | None:
        """Seconds that are left, none for no limit; TimeoutExpired when none are."""
        if self._seconds is None:
            return at_most
        left = self._end - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(self._process.args, self._seconds)
        return left if at_most is None else min(left, at_most)

    def wait(self) -> None:
        """Wait for the end of a program whose output has ended: nearly always that is now."""
        self._process.wait(timeout=None if self._seconds is None else max(0.1, self._end - time.monotonic()))


def _feed(pipe: IO[bytes], data: memoryview) -> memoryview:
    """Write what the pipe takes now; returns the rest, nothing when the program no longer reads."""
    try:
        return data[os.write(pipe.fileno(), data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


_running: set[subprocess.Popen[bytes]] = set()


@contextlib.contextmanager
def interruptible(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads run programs: when the block is left by an exception, the programs are ended first.

    Ctrl-C reaches the main thread alone, which would otherwise wait for them to end by themselves.
    """
    before = set(_running)
    try:
        yield pool
    except BaseException:
        # First what has not begun: a thread whose program is ended takes the next piece of work at once.
        pool.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=pool.shutdown, name="wait for the pool", daemon=True)
        ending.start()
        while ending.is_alive():
            for program in list(_running - before):  # also one that had been about to start
                kill_group(program)
            ending.join(0.05)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def meanwhile(argv: Sequence[str | Path], *, what: str, env: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """A program at work while the block runs, and ended with it: nobody asks how far it came.

    It must print less than a pipe holds (64 KiB on Linux).

    Raises:
        MachineError: the program cannot be started.
    """
    with _started([str(word) for word in argv], what, env, cwd, None) as process:
        yield
        kill_group(process)


class Beside(Future[T]):
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


# The work that a thread does.
_here = threading.local()


def beside(action: Callable[[], T]) -> Beside[T]:
    """Run something in a thread that nobody has to wait for: it ends with the process, if not before."""
    future: Beside[T] = Beside()

    def work() -> None:
        _here.work = future
        try:
            future.set_result(action())
        except BaseException as failure:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(failure)

    threading.Thread(target=work, daemon=True).start()
    return future


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and all its children: SIGTERM to its group, then SIGKILL, also when interrupted again."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def mask(text: str) -> str:
    """``text`` without the user names and passwords of the URLs in it."""
    return _CREDENTIALS.sub("://***@", text)


def describe_status(status: int) -> str:
    """An exit status in words: ``exited with status 2``, ``was ended by SIGKILL``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The last lines of a program's output."""
    return "\n".join(text.rstrip().splitlines()[-lines:])
