"""How an agent joins the run: both ends prove the token, and the head compares what the agent runs with its own.

The agent's side waits, each wait with a deadline; the head's side is one step for each message, since a thousand agents
may join at once.
"""

import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from envbuild_smoke.nodes.wire import VERSION, Greeting, Message, Wire, WireError, nonce
from envbuild_smoke.plan.json_reader import PlanError, read_object

# Of the handshake, once the connection is there.
ANSWER_SECONDS = 30.0
# Between two tries to reach a head that does not listen yet.
RETRY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What an agent states about itself; `slots` are its GPUs, or the processes that it takes on the CPU.

    `address` is where other nodes reach it; `host` is its name, for people.
    """

    plan_digest: str
    nonce: str
    smoke_digest: str | None
    slots: int
    host: str
    address: str = ""


class RefusedError(Exception):
    """The head does not take this agent; the reason is the head's."""


class HeadGreeting:
    """The head's side of one handshake; `receive` is called with each message until `joining` is there.

    Or until `unable` is: why a node cannot take part.
    """

    def __init__(self, wire: Wire, token: bytes) -> None:
        self.wire = wire
        self.node: int | None = None
        self.joining: Joining | None = None
        self.unable = ""
        self._token = token
        self._greeting: Greeting | None = None
        self._proven = False

    def receive(self, message: Message) -> None:
        """Take the next message of the agent and answer it. Raises WireError when it is none that belongs here."""
        if self._greeting is None:
            self._greet(message)
        elif not self._proven:
            if not self._greeting.proves(message.get("proof"), self._token, "agent"):
                raise WireError("it does not have this run's token")
            self.wire.authenticate(self._greeting.session_key(self._token), "head")
            self._proven = True
            self.wire.send({"event": "proven"})
        elif "unable" in message:
            self.node, self.unable = self._greeting.node, str(message["unable"])
        else:
            try:
                self.joining = read_object(Joining, message, "an agent")
            except PlanError as error:
                raise WireError(f"it states what cannot be read: {error}") from error
            self.node = self._greeting.node

    def refuse(self, reason: str) -> None:
        """Tell the agent why it is not taken."""
        self.wire.send({"event": "refused", "reason": reason})

    def admit(self) -> None:
        """Tell the agent that it is in."""
        self.wire.send({"event": "admitted"})

    def _greet(self, message: Message) -> None:
        node, agent_nonce = message.get("node"), message.get("nonce")
        if message.get("hello") != VERSION or not isinstance(node, int) or not isinstance(agent_nonce, str):
            raise WireError("it is no agent of this version")
        self._greeting = Greeting(node=node, agent_nonce=agent_nonce, head_nonce=nonce())
        self.wire.send({"nonce": self._greeting.head_nonce, "proof": self._greeting.proof(self._token, "head")})


def join(
    address: Callable[[], tuple[str, int]], node: int, token: bytes, joining: Joining, *, limit_seconds: float
) -> Wire:
    """Connect to the head, prove the token, have the head prove it, and return the connection once it took this agent.

    `address` is called before each try, until the head is reached.
    The address in `joining` is taken from this end of the connection.
    Raises WireError when there is no such head within the limit, and RefusedError.
    """
    wire = _proven(address, node, token, limit_seconds)
    try:
        wire.send(asdict(replace(joining, address=wire.address)))
        answer = _next(wire)
        if answer.get("event") != "admitted":
            raise RefusedError(str(answer.get("reason")))
    except BaseException:
        wire.close()
        raise
    return wire


def decline(address: Callable[[], tuple[str, int]], node: int, token: bytes, why: str, *, limit_seconds: float) -> None:
    """Tell the head that this node cannot take part in the run, which ends with that. Raises WireError."""
    wire = _proven(address, node, token, limit_seconds)
    try:
        wire.send({"unable": why})
        _next(wire)
    finally:
        wire.close()


def _proven(address: Callable[[], tuple[str, int]], node: int, token: bytes, limit_seconds: float) -> Wire:
    """Return a connection to the head, both of whose ends have the token. Raises WireError."""
    wire = Wire(_connect(address, limit_seconds))
    try:
        mine = nonce()
        wire.send({"hello": VERSION, "node": node, "nonce": mine})
        answer = _next(wire)
        theirs = answer.get("nonce")
        if not isinstance(theirs, str):
            raise WireError("it is no head of a run")
        greeting = Greeting(node=node, agent_nonce=mine, head_nonce=theirs)
        if not greeting.proves(answer.get("proof"), token, "head"):
            raise WireError("it does not have this run's token")
        wire.send({"proof": greeting.proof(token, "agent")})
        wire.authenticate(greeting.session_key(token), "agent")
        _next(wire)
    except BaseException:
        wire.close()
        raise
    return wire


def _connect(address: Callable[[], tuple[str, int]], limit_seconds: float) -> socket.socket:
    """Return a connection to a head that may not listen yet. Raises WireError after the limit."""
    limit = time.monotonic() + limit_seconds
    while True:
        host, port = address()
        try:
            return socket.create_connection((host, port), timeout=max(RETRY_SECONDS, limit - time.monotonic()))
        except OSError as error:
            if time.monotonic() > limit:
                raise WireError(
                    f"{host}:{port} was not reached within {limit_seconds:g} s: {error.strerror or error}"
                ) from error
        time.sleep(RETRY_SECONDS)


def _next(wire: Wire) -> Message:
    """Return the next message. Raises WireError when none comes in time."""
    limit = time.monotonic() + ANSWER_SECONDS
    while (left := limit - time.monotonic()) > 0:
        select.select([wire], [wire] if wire.waiting else [], [], left)
        wire.flush()
        if messages := wire.receive():
            # What node 0 sends after its answer is for the agent.
            wire.put_back(messages[1:])
            return messages[0]
    raise WireError(f"no answer within {ANSWER_SECONDS:g} s")
