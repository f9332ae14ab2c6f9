"""The pool of another node, as node 0 has it: what it is told to do, and what it reports."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from envbuild_smoke.nodes.hub import Agent, Hub
from envbuild_smoke.nodes.wire import Message
from envbuild_smoke.ranks.ipc import RankCommand
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.pool import Meeting, RankProcess


class RemotePool:
    """The rank processes of an agent; times that it reports are on this node's clock.

    `server_event` and `server_end` are as in Pool.
    """

    def __init__(self, hub: Hub, agent: Agent) -> None:
        self.agent = agent
        self.server_event: Message | None = None
        self.server_end = ""
        self._hub = hub
        self._ports: deque[int] = deque()
        self._known: dict[int, RankProcess] = {}
        self._last_key = 0

    def start_server(self) -> None:
        """Have the node's fork server started, unless it runs."""
        if self.server_event is not None and self.server_event["event"] != "ready":
            self.server_event = None
        self._command("start-server")

    def acquire(self, devices: Sequence[int], logs: Sequence[Path], *, fresh: bool) -> list[RankProcess]:
        """Return a process for each device of the node. Raises ForkServerError when the node is lost."""
        if self.agent.lost:
            raise ForkServerError(f"{self.agent.label} was lost: {self.agent.lost}")
        keys = range(self._last_key + 1, self._last_key + 1 + len(devices))
        self._last_key += len(devices)
        processes = [RankProcess(key, device, node=self.agent.node) for key, device in zip(keys, devices, strict=True)]
        self._known.update({process.key: process for process in processes})
        self._command("acquire", keys=list(keys), devices=list(devices), logs=list(map(str, logs)), fresh=fresh)
        return processes

    def bind(self) -> Meeting:
        """Return a place that the node has bound already. Raises ForkServerError when it has none."""
        if not self._ports:
            raise ForkServerError(f"{self.agent.label} has no port for the ranks to meet at")
        return Meeting(self.agent.joining.address, self._ports.popleft())

    def send(self, process: RankProcess, command: RankCommand) -> None:
        """Send a task to a process."""
        self._command("task", key=process.key, task=asdict(command))

    def release(self, processes: Iterable[RankProcess]) -> None:
        """Keep processes whose task was done for the next one."""
        keys = [process.key for process in processes]
        for key in keys:
            self._known.pop(key, None)
        self._command("release", keys=keys)

    def retire(self, processes: Iterable[RankProcess]) -> None:
        """Kill processes and all that they started."""
        self._command("retire", keys=[process.key for process in processes])

    def request_stacks(self, process: RankProcess) -> None:
        """Have a process write its stacks to its log."""
        self._command("stacks", key=process.key)

    def lost(self) -> None:
        """Note that the node is lost, and all its processes with it."""
        for process in self._known.values():
            process.lost, process.lost_node = True, f"{self.agent.label} was lost: {self.agent.lost}"
        self._known.clear()

    def receive(self, message: Message) -> None:
        """Note what the agent reports."""
        event = message["event"]
        if event == "bound":
            self._ports.append(message["port"])
        elif event == "server":
            self.server_event, self.server_end = message["content"], message["end"]
        elif process := self._known.get(message.get("key", 0)):
            self._note(process, event, message)

    def _note(self, process: RankProcess, event: str, message: Message) -> None:
        offset = self.agent.clock.seconds
        if event == "started":
            process.pid, process.began_fresh = message["pid"], message["fresh"]
        elif event == "rank":
            process.receive(_on_our_clock(message["message"], offset))
        elif event == "exit":
            process.exit_status, process.exited_at = message["status"], message["monotonic_seconds"] + offset
            self._known.pop(process.key)
        elif event == "lost":
            process.lost = True
            self._known.pop(process.key)

    def _command(self, name: str, **values: object) -> None:
        self._hub.send(self.agent, {"command": name, **values})


def _on_our_clock(message: Mapping[str, object], offset: float) -> Message:
    moment = message.get("monotonic_seconds")
    return {**message, "monotonic_seconds": moment + offset} if isinstance(moment, float) else dict(message)
