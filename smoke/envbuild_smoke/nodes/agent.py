"""The agent of a node other than 0: joins the run, and has rank processes started and ended as node 0 says.

Node 0 sends one command a message:
  {"command": "start-server"}, {"command": "end"}, {"command": "ping", "sent": t}
  {"command": "canary", "name": FILE, "content": TEXT}
  {"command": "acquire", "keys": [..], "devices": [..], "logs": [..], "fresh": bool}
  {"command": "task", "key": n, "task": {..}}           with the fields of RankCommand
  {"command": "release"|"retire", "keys": [..]}, {"command": "stacks", "key": n}
  {"command": "gpu-states"}            after the last task
and reads what the agent reports:
  {"event": "bound", "port": n}        a port that is bound, for ranks to meet at
  {"event": "pong", "sent": t, "monotonic_seconds": t, "time_of_day": t}
  {"event": "state", "state": {..}}    what runs here: the fields of NodeState
  {"event": "canary", "seen": bool}, {"event": "gpu-states", "states": [..]}
  {"event": "server", "content": {..}|null, "end": TEXT}
  {"event": "started", "key": n, "pid": n, "fresh": bool}, {"event": "rank", "key": n, "message": {..}}
  {"event": "exit", "key": n, "status": n, "monotonic_seconds": t}, {"event": "lost", "key": n}
"""

import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from envbuild_smoke.environment import gpus
from envbuild_smoke.nodes import canary
from envbuild_smoke.nodes.hub import SILENCE_SECONDS
from envbuild_smoke.nodes.wire import Message, Wire, WireError
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.ranks.ipc import RankCommand
from envbuild_smoke.run.context import POLL_SECONDS, RunContext, RunInterruptedError
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.pool import DEATH_LIMIT_SECONDS, Meeting, Pool, RankProcess


class LostHeadError(Exception):
    """Node 0 is gone before it said that the run has ended."""


@dataclass
class _Held:
    """A process that node 0 knows by a key, and what it was told of it."""

    process: RankProcess
    started: bool = False


class Agent:
    """Serves one run over its connection."""

    def __init__(self, wire: Wire, pool: Pool, context: RunContext, slots: int) -> None:
        self._wire = wire
        self._pool = pool
        self._context = context
        self._heard_at = time.monotonic()
        self._held: dict[int, _Held] = {}
        self._listeners: dict[int, socket.socket] = {}
        # In their order: an acquire waits until what was killed is gone, and what follows may need its processes.
        self._commands: deque[tuple[float, Message]] = deque()
        self._server: tuple[Message | None, str] | None = None
        self._ended = False
        pool.on_message = self._forward
        pool.watch(wire)
        # As many as tasks can run whose first rank is here.
        for _ in range(slots):
            self._bind()

    def send(self, message: Message) -> None:
        """Send a message to node 0."""
        self._wire.send(message)

    def serve(self) -> None:
        """Do what node 0 says until the run ends. Raises LostHeadError and RunInterruptedError."""
        try:
            while not self._ended:
                if self._context.stop.is_set():
                    raise RunInterruptedError
                self.update()
        except WireError as error:
            raise LostHeadError(f"node 0: {error}") from error
        finally:
            for listener in self._listeners.values():
                listener.close()
            self._wire.close()

    def update(self) -> None:
        """Wait a moment for what happens, and report it. Raises WireError when node 0 is gone."""
        self._pool.wait(POLL_SECONDS)
        self._wire.flush()
        for message in self._wire.receive():
            self._heard_at = time.monotonic()
            if message["command"] == "ping":
                clocks = {"monotonic_seconds": time.monotonic(), "time_of_day": time.time()}
                self.send({"event": "pong", "sent": message["sent"], **clocks})
            else:
                self._commands.append((time.monotonic(), message))
        if time.monotonic() > self._heard_at + SILENCE_SECONDS:
            raise WireError(f"it was silent for {SILENCE_SECONDS:g} s")
        while self._commands and self._done(*self._commands[0]):
            self._commands.popleft()
        self._report()

    def _done(self, since: float, message: Message) -> bool:
        """Do a command; False if it has to wait."""
        command = message["command"]
        answers = {"canary": self._answer_canary, "gpu-states": self._answer_gpu_states}
        if command in answers:
            return answers[command](since, message)
        if command == "acquire":
            late = time.monotonic() > since + DEATH_LIMIT_SECONDS
            if not late and not self._pool.is_clear(message["devices"]):
                return False
            self._acquire(message)
        elif command == "task":
            self._start_task(message)
        elif command == "release":
            self._pool.release(self._given_up(message["keys"]))
        elif command == "retire":
            # They stay known until their end is reported.
            self._pool.retire([self._held[key].process for key in message["keys"] if key in self._held])
        elif command == "stacks" and message["key"] in self._held:
            self._pool.request_stacks(self._held[message["key"]].process)
        elif command == "start-server":
            self._pool.start_server()
        elif command == "end":
            self._ended = True
        return True

    def _answer_canary(self, since: float, message: Message) -> bool:
        seen = canary.answer(self._context.out, message["name"], message["content"])
        if not seen and time.monotonic() < since + canary.LIMIT_SECONDS:
            return False
        self.send({"event": "canary", "seen": seen})
        return True

    def _answer_gpu_states(self, since: float, _message: Message) -> bool:
        # Without the memory of ranks that wait.
        if not self._pool.emptied() and time.monotonic() < since + DEATH_LIMIT_SECONDS:
            return False
        self.send({"event": "gpu-states", "states": gpus.states(self._context.options.gpus)})
        return True

    def _acquire(self, message: Message) -> None:
        logs = [Path(log) for log in message["logs"]]
        try:
            processes = self._pool.acquire(message["devices"], logs, fresh=message["fresh"])
        except ForkServerError:
            for key in message["keys"]:
                self.send({"event": "lost", "key": key})
            return
        self._held.update({key: _Held(each) for key, each in zip(message["keys"], processes, strict=True)})

    def _start_task(self, message: Message) -> None:
        command = read_object(RankCommand, message["task"], "a task")
        listener = self._listeners.pop(command.port, None) if command.listens else None
        if message["key"] in self._held:
            meeting = Meeting(command.host, command.port, listener)
            self._pool.send(self._held[message["key"]].process, command, meeting)
        if listener is not None:
            listener.close()
            self._bind()

    def _given_up(self, keys: list[int]) -> list[RankProcess]:
        return [held.process for key in keys if (held := self._held.pop(key, None)) is not None]

    def _bind(self) -> None:
        listener = socket.create_server((self._pool.host, 0))
        port = listener.getsockname()[1]
        self._listeners[port] = listener
        self.send({"event": "bound", "port": port})

    def _forward(self, process: RankProcess, message: Message) -> None:
        for key, held in self._held.items():
            if held.process is process:
                self._report_start(key, held)
                self.send({"event": "rank", "key": key, "message": message})

    def _report(self) -> None:
        """Report what has changed."""
        server = (self._pool.server_event, self._pool.server_end)
        if server != self._server:
            self._server = server
            self.send({"event": "server", "content": server[0], "end": server[1]})
        for key, held in list(self._held.items()):
            process = held.process
            self._report_start(key, held)
            if process.exited_at is not None:
                end = {"status": process.exit_status, "monotonic_seconds": process.exited_at}
                self.send({"event": "exit", "key": key, **end})
            elif process.lost:
                self.send({"event": "lost", "key": key})
            if process.gone:
                del self._held[key]

    def _report_start(self, key: int, held: _Held) -> None:
        if not held.started and held.process.pid is not None:
            held.started = True
            self.send({"event": "started", "key": key, "pid": held.process.pid, "fresh": held.process.began_fresh})
