"""The template process: imports the libraries once, and forks every rank from there.

Importing torch and megatron-core takes seconds of processor time, and a matrix of cases starts dozens of
ranks. So one process imports them, and each rank is a fork of it: a process of its own, with its own
process group and memory, that starts in milliseconds. Nothing a rank does reaches the next one.

The runner talks to it in JSON lines, commands on stdin, events on stdout:
  {"case": ID, "plan": TEXT, "out": DIR, "ranks": [{"log": FILE, "environment": {..}}, ..]}    fork the ranks
  {"event": "ready", "cuda_devices": n, "modules": {name: {"file": .., "version": ..}}}
  {"event": "unusable", "error": TEXT}
  {"event": "started", "case": ID, "pids": [..]}
  {"event": "exit", "pid": n, "status": n, "monotonic_seconds": t}      a negative status is a signal
When stdin ends, because the runner is done or is gone, it kills what still runs and ends.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from envbuild_smoke.environment import MODULES
from envbuild_smoke.rank import RankContext, last_line, run_rank

_PR_SET_PDEATHSIG = 1
_COUNT_FAILED = 255


def serve(entry: str, preload: tuple[str, ...]) -> int:
    """Import `preload`, then fork ranks on command until stdin ends.

    `entry` is the function a rank runs, as "module:function"; it takes a RankContext.
    """
    # Libraries print while they are imported: events get a descriptor of their own, stdout becomes stderr.
    events = os.dup(1)
    os.dup2(2, 1)
    # Ctrl-C in a terminal is the runner's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in preload:
            importlib.import_module(name)
        devices = _cuda_devices()
    except BaseException as error:  # noqa: BLE001 - an import can raise anything; the runner has to hear of it
        traceback.print_exc()
        _send(events, {"event": "unusable", "error": last_line(error)})
        return 1
    modules = {
        name: {"file": getattr(module, "__file__", None), "version": getattr(module, "__version__", None)}
        for name in MODULES
        if (module := sys.modules.get(name)) is not None
    }
    _send(events, {"event": "ready", "cuda_devices": devices, "modules": modules})
    # What is still in the buffers would be printed once more by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    # Objects made so far stay shared between the ranks instead of being copied at the first collection.
    gc.collect()
    gc.freeze()
    return _Server(entry, events).run()


def _cuda_devices() -> int:
    """Return how many GPUs torch sees; refuses to go on when an import has started CUDA in this process."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    # Counting may start CUDA, which does not survive a fork: so it is done in a fork, as ranks will use it.
    pid = os.fork()
    if pid == 0:
        count = _COUNT_FAILED
        with suppress(BaseException):
            count = _COUNT_FAILED if torch.cuda._is_in_bad_fork() else min(torch.cuda.device_count(), 254)
        os._exit(count)
    _, status = os.waitpid(pid, 0)
    count = os.waitstatus_to_exitcode(status)
    if not 0 <= count < _COUNT_FAILED:
        raise RuntimeError("CUDA was started while the libraries were imported; ranks cannot be forked from here")
    return count


class _Server:
    """Reads commands, forks ranks, and reports their ends."""

    def __init__(self, entry: str, events: int) -> None:
        self._entry = entry
        self._events = events
        self._pid = os.getpid()
        self._running: set[int] = set()

    def run(self) -> int:
        """Serve until stdin ends."""
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        # Without a handler, nothing is written to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_write)
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    chunk = os.read(key.fd, 65536)
                    if key.fd == wake_read:
                        self._reap()
                        continue
                    if not chunk:
                        self._kill_all()
                        return 0
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self._start(json.loads(line))

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._running.discard(pid)
            exit_status = os.waitstatus_to_exitcode(status)
            moment = time.monotonic()
            _send(
                self._events,
                {"event": "exit", "pid": pid, "status": exit_status, "monotonic_seconds": moment},
            )

    def _kill_all(self) -> None:
        for pid in self._running:
            # The pid for a rank that has no group of its own yet.
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _start(self, command: dict[str, Any]) -> None:
        # Rank 0 inherits this very socket, so that nobody can take the port before it is used.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pids = []
            for rank in range(len(command["ranks"])):
                pid = os.fork()
                if pid == 0:
                    self._become_rank(command, rank, listener)
                pids.append(pid)
        self._running.update(pids)
        _send(self._events, {"event": "started", "case": command["case"], "pids": pids})

    def _become_rank(self, command: dict[str, Any], rank: int, listener: socket.socket) -> NoReturn:
        """Turn this fork into a rank; it never returns into the server's loop."""
        status = 1
        try:
            self._leave_server(command["ranks"][rank]["log"])
            port = listener.getsockname()[1]
            os.environ.update(command["ranks"][rank]["environment"], MASTER_PORT=str(port))
            if rank > 0:
                listener.close()
            context = RankContext.from_command(
                command, rank=rank, port=port, listener=listener.detach() if rank == 0 else None
            )
            status = run_rank(self._entry, context)
        except BaseException:  # noqa: BLE001 - whatever happens here must not reach the server's loop
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not sys.exit: exit handlers that were registered in the template are the template's.
            os._exit(status)

    def _leave_server(self, log_path: str) -> None:
        """Give up what belongs to the server: its signals, its descriptors, its process group."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        # If the template is killed, nobody else would end its ranks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        # What a rank starts must not hold the event stream open: the runner would not see the template end.
        for descriptor in (null, log, self._events):
            os.close(descriptor)
        # A rank that is killed cannot flush: its log has to have every line by then.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _send(descriptor: int, message: dict[str, Any]) -> None:
    # When the runner is gone nobody listens; the end of stdin tells the loop.
    with suppress(BrokenPipeError):
        os.write(descriptor, (json.dumps(message) + "\n").encode())
