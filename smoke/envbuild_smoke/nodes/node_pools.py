"""The pools of all nodes as one: devices are counted over the nodes, so many on each."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from envbuild_smoke.nodes.hub import Agent, Hub
from envbuild_smoke.nodes.remote_pool import RemotePool
from envbuild_smoke.nodes.wire import Message
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.ranks.ipc import RankCommand
from envbuild_smoke.results import NodeEnd, NodeLine, NodeState
from envbuild_smoke.run.context import POLL_SECONDS
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.pool import DEATH_LIMIT_SECONDS, Meeting, Pool, RankProcess

T = TypeVar("T")


class NodePools:
    """The rank processes of a run over several nodes; a node that is lost has no devices any more.

    `canaries` is whether other nodes have this results folder.
    """

    def __init__(self, local: Pool, on_node: int) -> None:
        self._states: dict[int, NodeState] = {}
        self._ends: dict[int, NodeEnd] = {}
        self.canaries: dict[int, bool] = {}
        self._on_node = on_node
        self._local = local
        self._remotes: dict[int, RemotePool] = {}
        self._noted_lost: set[int] = set()
        self._closed = False

    def attach(self, hub: Hub) -> None:
        """Have the agents that a hub takes in."""
        self._hub = hub
        self._local.watch(hub)

    @property
    def nodes(self) -> list[int]:
        """The nodes that have joined this one."""
        return sorted(self._hub.agents)

    @property
    def silent(self) -> list[int]:
        """The nodes that are not lost, and have not reported what runs there."""
        agents = self._hub.agents.values()
        return [each.node for each in agents if not each.lost and not (each.node in self._states and each.clock.known)]

    @property
    def lines(self) -> list[NodeLine]:
        """What other nodes report about themselves, with what their clocks were measured to be."""
        clocks = {node: self._hub.agents[node].time_of_day for node in sorted(self._states)}
        return [
            NodeLine(
                **vars(self._states[node]),
                node=node,
                clock_ahead_seconds=round(-clock.seconds, 6),
                clock_error_seconds=round(clock.round_trip / 2, 6),
            )
            for node, clock in clocks.items()
            if clock.known
        ]

    def ask_for_canaries(self, names: Mapping[int, str], content: str) -> None:
        """Ask nodes for files in the results folder; `canaries` has their answers."""
        for node, name in names.items():
            self._hub.send(self._hub.agents[node], {"command": "canary", "name": name, "content": content})

    def ask_for_gpu_states(self) -> None:
        """Have every node end its ranks and read the states of its GPUs; `ends` has the answers."""
        for agent in self._hub.agents.values():
            self._hub.send(agent, {"command": "gpu-states"})

    @property
    def ends(self) -> tuple[NodeEnd, ...]:
        """The GPUs of the nodes that have answered, in the order of the nodes."""
        return tuple(self._ends[node] for node in sorted(self._ends))

    @property
    def all_ended(self) -> bool:
        """True when every node has answered that is not lost."""
        return self._ends.keys() | self.lost.keys() >= self._hub.agents.keys()

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._local.plan

    @property
    def lost(self) -> Mapping[int, str]:
        """Why nodes are lost, by number."""
        agents = self._hub.agents.values()
        return {agent.node: f"{agent.label} was lost: {agent.lost}" for agent in agents if agent.lost}

    @property
    def is_ready(self) -> bool:
        """True when every node that is not lost can start ranks."""
        return (event := self.server_event) is not None and event["event"] == "ready"

    @property
    def server_event(self) -> Message | None:
        """The first report of a fork server that is not "ready"; None until all have imported the libraries."""
        events = [self._local.server_event, *(pool.server_event for pool in self._alive)]
        if None in events:
            return None
        return next((event for event in events if event and event["event"] != "ready"), events[0])

    @property
    def server_end(self) -> str:
        """How a fork server ended."""
        ends = (f"{pool.agent.label}: {pool.server_end}" for pool in self._remotes.values() if pool.server_end)
        return self._local.server_end or next(ends, "")

    def start_server(self) -> None:
        """Start every node's fork server, unless it runs."""
        self._local.start_server()
        for pool in self._alive:
            pool.start_server()

    def place(self, device: int) -> tuple[int, int]:
        """Return the node of a device, and its number there."""
        return divmod(device, self._on_node)

    def acquire(self, devices: Sequence[int], logs: Sequence[Path], *, fresh: bool = False) -> list[RankProcess]:
        """Return a process for each device. Raises ForkServerError when a node has none."""
        by_device: dict[int, RankProcess] = {}
        by_node = _grouped(zip(devices, logs, strict=True), lambda pair: self.place(pair[0])[0])
        for node, pairs in by_node.items():
            places = [self.place(device)[1] for device, _ in pairs]
            node_logs = [log for _, log in pairs]
            pool = self._local if node == 0 else self._remotes[node]
            if node == 0:
                self._wait_until_clear(places)
            try:
                processes = pool.acquire(places, node_logs, fresh=fresh)
            except ForkServerError:
                self.retire(by_device.values())
                raise
            by_device.update({device: process for (device, _), process in zip(pairs, processes, strict=True)})
        return [by_device[device] for device in devices]

    def _wait_until_clear(self, devices: Sequence[int]) -> None:
        """Wait until what was killed on this node is gone, as an agent does; other nodes are answered meanwhile."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        while not self._local.is_clear(devices) and time.monotonic() < limit:
            self.wait(POLL_SECONDS)

    def bind(self, process: RankProcess) -> Meeting:
        """Return a place that this process can listen at."""
        return self._local.bind(process) if process.node == 0 else self._remotes[process.node].bind()

    def send(self, process: RankProcess, command: RankCommand, meeting: Meeting) -> None:
        """Send a task to a process, and to the one that listens its socket."""
        if process.node == 0:
            self._local.send(process, command, meeting)
        else:
            self._remotes[process.node].send(process, command)

    def release(self, processes: Sequence[RankProcess]) -> None:
        """Keep processes whose task was done for the next one."""
        for node, group in _grouped(processes, lambda process: process.node).items():
            (self._local if node == 0 else self._remotes[node]).release(group)

    def retire(self, processes: Iterable[RankProcess]) -> None:
        """Kill processes and all that they started."""
        for node, group in _grouped(processes, lambda process: process.node).items():
            (self._local if node == 0 else self._remotes[node]).retire(group)

    def request_stacks(self, process: RankProcess) -> None:
        """Have a process write its stacks to its log."""
        if process.node == 0:
            self._local.request_stacks(process)
        else:
            self._remotes[process.node].request_stacks(process)

    def wait(self, timeout_seconds: float) -> None:
        """Read what processes of all nodes report; return at once when there is something, else after the timeout."""
        self._local.wait(timeout_seconds)
        self._hub.update(time.monotonic())
        for node in (self.lost.keys() & self._remotes.keys()) - self._noted_lost:
            self._noted_lost.add(node)
            self._remotes[node].lost()

    def received(self, agent: Agent, message: Message) -> None:
        """Note a message of an agent."""
        if message["event"] == "state":
            self._states[agent.node] = read_object(NodeState, message["state"], agent.label)
        elif message["event"] == "gpu-states":
            end = {"node": agent.node, "gpu_states": message["states"]}
            self._ends[agent.node] = read_object(NodeEnd, end, agent.label)
        elif message["event"] == "canary":
            self.canaries[agent.node] = message["seen"] is True
        else:
            if agent.node not in self._remotes:
                self._remotes[agent.node] = RemotePool(self._hub, agent)
            self._remotes[agent.node].receive(message)

    def close(self) -> None:
        """Kill every process, and end what started them: an agent whose connection is closed does."""
        if self._closed:
            return
        self._closed = True
        for agent in self._hub.agents.values():
            self._hub.send(agent, {"command": "end"})
        self._local.unwatch(self._hub)
        self._hub.close()
        self._local.close()

    @property
    def _alive(self) -> list[RemotePool]:
        return [pool for pool in self._remotes.values() if not pool.agent.lost]


def _grouped(values: Iterable[T], key: Callable[[T], int]) -> dict[int, list[T]]:
    groups: dict[int, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
