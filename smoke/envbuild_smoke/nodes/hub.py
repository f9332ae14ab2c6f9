"""Node 0's side of the connections: takes agents in, measures their clocks, and notes which are lost."""

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from envbuild_smoke.nodes.clock import ClockOffset
from envbuild_smoke.nodes.join import ANSWER_SECONDS, HeadGreeting, Joining
from envbuild_smoke.nodes.wire import Message, Wire, WireError

# An agent is asked so often, and is lost when it is silent for so long.
PING_SECONDS = 4.0
SILENCE_SECONDS = 20.0
# Connections that have proven nothing yet: more are left in the queue of the listening socket.
MOST_GREETINGS = 2048


@dataclass
class Agent:
    """An agent that joined. `lost` is why it is gone, "" while it is there.

    `clock` is of the monotonic clock, and `time_of_day` of the other one.
    """

    node: int
    joining: Joining
    wire: Wire
    heard_at: float
    clock: ClockOffset = field(default_factory=ClockOffset)
    time_of_day: ClockOffset = field(default_factory=ClockOffset)
    lost: str = ""

    @property
    def label(self) -> str:
        """What people call it."""
        return f"node {self.node} ({self.joining.host})"


class Hub:
    """The agents of a run of `nodes` nodes, of which this process is node 0.

    `admits` returns why an agent is refused, "" if it is not; `on_refused` is called with a sentence for each
    connection that is turned away, and `on_message` with every message of an agent. `unable` is, by node that has no
    agent, why it cannot take part.
    """

    def __init__(
        self,
        listener: socket.socket,
        nodes: int,
        token: bytes,
        *,
        admits: Callable[[Joining], str],
        on_refused: Callable[[str], None],
        on_message: Callable[[Agent, Message], None],
    ) -> None:
        listener.setblocking(False)
        self.agents: dict[int, Agent] = {}
        self.unable: dict[int, str] = {}
        self._listener = listener
        self._nodes = nodes
        self._token = token
        self._admits = admits
        self._on_refused = on_refused
        self._on_message = on_message
        self._greetings: dict[HeadGreeting, tuple[float, str]] = {}
        self._pinged_at = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to `update`."""
        return self._selector.fileno()

    @property
    def missing(self) -> tuple[int, ...]:
        """The nodes whose agents have not joined."""
        return tuple(node for node in range(1, self._nodes) if node not in self.agents)

    def send(self, agent: Agent, message: Message) -> None:
        """Send a message; an agent that cannot be reached is lost."""
        if agent.lost:
            return
        try:
            agent.wire.send(message)
            self._watch(agent.wire, agent)
        except WireError as error:
            self._lose(agent, str(error))

    def update(self, now: float) -> None:
        """Read what has arrived, ask who is still there, and note who is not."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, HeadGreeting):
                self._greet(key.data, now)
            else:
                self._read(key.data, now)
        for greeting, (since, peer) in list(self._greetings.items()):
            if now > since + ANSWER_SECONDS:
                self._turn_away(greeting, f"{peer} said nothing for {ANSWER_SECONDS:g} s")
        if now > self._pinged_at + PING_SECONDS:
            self._pinged_at = now
            for agent in self.agents.values():
                self.send(agent, {"command": "ping", "sent": time.monotonic()})
        for agent in self.agents.values():
            if not agent.lost and now > agent.heard_at + SILENCE_SECONDS:
                self._lose(agent, f"it was silent for {SILENCE_SECONDS:g} s")

    def close(self) -> None:
        """Close all connections: for agents that is the end of the run."""
        for greeting in list(self._greetings):
            greeting.wire.close()
        for agent in self.agents.values():
            if not agent.lost:
                self._lose(agent, "the run has ended")
        self._listener.close()
        self._selector.close()

    def _accept(self, now: float) -> None:
        while len(self._greetings) < MOST_GREETINGS:
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            greeting = HeadGreeting(Wire(connection), self._token)
            self._greetings[greeting] = (now, f"{address[0]}:{address[1]}")
            self._selector.register(greeting.wire, selectors.EVENT_READ, greeting)

    def _greet(self, greeting: HeadGreeting, now: float) -> None:
        peer = self._greetings[greeting][1]
        try:
            for message in greeting.wire.receive():
                greeting.receive(message)
            if greeting.node is None:
                return
            if greeting.joining is not None:
                self._take_in(greeting, greeting.node, greeting.joining, now)
            elif greeting.node in self.missing:
                self.unable[greeting.node] = greeting.unable
                greeting.refuse(greeting.unable)
                self._turn_away(greeting, f"node {greeting.node} cannot take part: {greeting.unable}")
        except WireError as error:
            self._turn_away(greeting, f"{peer}: {error}")

    def _take_in(self, greeting: HeadGreeting, node: int, joining: Joining, now: float) -> None:
        reason = self._refusal(node, joining)
        if reason:
            greeting.refuse(reason)
            self._turn_away(greeting, f"node {node} ({joining.host}): {reason}")
            return
        greeting.admit()
        del self._greetings[greeting]
        agent = Agent(node=node, joining=joining, wire=greeting.wire, heard_at=now)
        self.agents[node] = agent
        self._selector.modify(agent.wire, selectors.EVENT_READ, agent)
        self.send(agent, {"command": "ping", "sent": time.monotonic()})

    def _refusal(self, node: int, joining: Joining) -> str:
        if not 0 < node < self._nodes:
            return f"the run has nodes 0 to {self._nodes - 1}"
        if node in self.agents:
            return f"node {node} has an agent already, on {self.agents[node].joining.host}"
        return self._admits(joining)

    def _read(self, agent: Agent, now: float) -> None:
        try:
            agent.wire.flush()
            self._watch(agent.wire, agent)
            messages = agent.wire.receive()
        except WireError as error:
            self._lose(agent, str(error))
            return
        for message in messages:
            agent.heard_at = now
            if message.get("event") == "pong":
                sent, received, time_of_day = message["sent"], time.monotonic(), time.time()
                agent.clock.measured(sent, message["monotonic_seconds"], received)
                agent.time_of_day.measured(time_of_day - (received - sent), message["time_of_day"], time_of_day)
            else:
                self._on_message(agent, message)

    def _watch(self, wire: Wire, agent: Agent) -> None:
        """Also wake up when the peer reads, while something waits for it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.waiting else 0)
        if self._selector.get_key(wire).events != events:
            self._selector.modify(wire, events, agent)

    def _turn_away(self, greeting: HeadGreeting, why: str) -> None:
        del self._greetings[greeting]
        self._selector.unregister(greeting.wire)
        greeting.wire.close()
        self._on_refused(why)

    def _lose(self, agent: Agent, why: str) -> None:
        agent.lost = why
        self._selector.unregister(agent.wire)
        agent.wire.close()
