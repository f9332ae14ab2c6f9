"""The fork server: imports the libraries once, and is the parent of every rank process.

Importing torch and megatron-core takes seconds of processor time. So one process imports them, and a rank
process is a fork of it, which starts in milliseconds. With isolation "process" it executes a new interpreter
for each rank instead, which imports everything itself and shares nothing.

The runner talks to it over a socket, one JSON object a line:
  {"start": KEY, "how": "fork"|"execute", "log": FILE}      with the descriptor of the rank's channel
  {"event": "ready", "cuda_devices": n, "modules": {..}, "missing": {..}, "imported": {..}, "libraries": {..}, ..}
  {"event": "unusable", "error": TEXT}
  {"event": "started", "key": KEY, "pid": n}
  {"event": "exit", "key": KEY, "status": n, "monotonic_seconds": t}      a negative status is a signal
When the runner closes the connection, or ends, the fork server kills what still runs and ends.
"""

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

from envbuild_smoke.environment import imported
from envbuild_smoke.error_line import error_line
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.ranks.ipc import Channel, Message
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.ranks.rank_main import enable_stack_dumps, redirect_output
from envbuild_smoke.ranks.rank_main import serve as serve_rank

# linux/prctl.h; Python has no binding of prctl.
_PR_SET_PDEATHSIG = 1


def serve(program: RankProgram, plan: Plan, plan_descriptor: int, control: int) -> int:
    """Import what the program preloads, then start rank processes on command until the runner disconnects."""
    # What libraries print while they are imported goes to the log, as stderr does.
    os.dup2(2, 1)
    # Ctrl-C in a terminal is the runner's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=control))
    try:
        for name in program.preload:
            importlib.import_module(name)
        ready = imported.describe(plan.expected_modules)
    except BaseException as error:  # noqa: BLE001 - an import can raise anything; it is reported to the runner
        traceback.print_exc()
        channel.send({"event": "unusable", "error": error_line(error)})
        return 1
    channel.send({"event": "ready", **asdict(ready)})
    # What is still in the buffers would be printed once more by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    # Objects made so far stay shared between the ranks instead of being copied at the first collection.
    gc.collect()
    gc.freeze()
    return _Server(program, plan, plan_descriptor, channel).run()


class _Server:
    """Takes commands, starts rank processes, and reports their ends."""

    def __init__(self, program: RankProgram, plan: Plan, plan_descriptor: int, control: Channel) -> None:
        self._program = program
        self._plan = plan
        self._plan_descriptor = plan_descriptor
        self._control = control
        self._pid = os.getpid()
        self._running: dict[int, int] = {}

    def run(self) -> int:
        """Serve until the runner disconnects."""
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            # set_wakeup_fd refuses a descriptor that blocks.
            os.set_blocking(descriptor, False)
        # Without a handler, nothing is written to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        # select is restarted after a signal (PEP 475): the byte in the pipe is what wakes the loop up.
        signal.set_wakeup_fd(wake_write)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == wake_read:
                        os.read(wake_read, 65536)
                        self._reap()
                        continue
                    commands, ended = self._control.receive_all()
                    if ended:
                        self._kill_all()
                        return 0
                    for command in commands:
                        self._start(command)

    def _reap(self) -> None:
        while self._running:
            # One SIGCHLD may stand for several children: signals of one kind are not queued (signal(7)).
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            key = self._running.pop(pid, None)
            exit_status = os.waitstatus_to_exitcode(status)
            moment = time.monotonic()
            self._control.send({"event": "exit", "key": key, "status": exit_status, "monotonic_seconds": moment})

    def _kill_all(self) -> None:
        for pid in self._running:
            kill_group(pid)

    def _start(self, command: Message) -> None:
        # SCM_RIGHTS: the descriptor came with the bytes of this command, so it is there and the first of those not
        # taken.
        channel = self._control.descriptor()
        pid = os.fork()
        if pid == 0:
            self._become_rank(command, channel)
        # The rank keeps the only copy: the runner sees the end of the stream as soon as the rank is gone.
        os.close(channel)
        self._running[pid] = command["start"]
        self._control.send({"event": "started", "key": command["start"], "pid": pid})

    def _become_rank(self, command: Message, channel: int) -> NoReturn:
        """Turn this fork into a rank process; it never returns into the server's loop."""
        status = 1
        try:
            self._leave_server(command["log"])
            if command["how"] == "execute":
                self._execute(channel)
            # A rank that is killed cannot flush: its log has to have every line by then.
            sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
            status = serve_rank(self._program, self._plan, Channel(socket.socket(fileno=channel)))
        except BaseException:  # noqa: BLE001 - whatever happens here must not reach the server's loop
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not sys.exit: exit handlers that were registered in the fork server are not the rank's.
            os._exit(status)

    def _execute(self, channel: int) -> NoReturn:
        """Become a new interpreter, started with the same options as this one."""
        # exec closes descriptors that are not inheritable (PEP 446).
        for descriptor in (channel, self._plan_descriptor):
            os.set_inheritable(descriptor, True)
        # The options of the interpreter (-I, -S) decide which packages are found: they have to be the same.
        arguments = [*sys.orig_argv[: -len(sys.argv)], sys.argv[0], "rank"]
        arguments += ["--channel", str(channel), "--plan-descriptor", str(self._plan_descriptor)]
        arguments += ["--program", self._program.as_argument()]
        os.execv(sys.executable, arguments)  # noqa: S606 - this very interpreter, no shell

    def _leave_server(self, log: str) -> None:
        """Leave the server's signal handlers, descriptors and process group."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # A group and session of its own: it is killed with all that it started, and a signal of the terminal does not
        # reach it.
        os.setsid()
        # If the fork server is killed, its ranks have to end by themselves.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # prctl(2): a parent that died before the call sends no signal.
        if os.getppid() != self._pid:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        redirect_output(log)
        # A child of a rank must not keep the connection open: the runner would not see the fork server end.
        self._control.close()


def kill_group(pid: int) -> None:
    """Kill a rank process and everything it started, if any of that is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # Between its fork and its setsid a rank answers to its pid alone.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_executed_rank(program: RankProgram, plan: Plan, channel: int) -> int:
    """Be a rank process in an interpreter of its own: import, then take tasks."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    enable_stack_dumps()
    for name in program.preload:
        importlib.import_module(name)
    status = serve_rank(program, plan, Channel(socket.socket(fileno=channel)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
