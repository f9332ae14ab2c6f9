"""Agents that join over loopback: proofs, refusals, silence, and clocks."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envbuild_smoke.nodes.clock import ClockOffset
from envbuild_smoke.nodes.hub import SILENCE_SECONDS, Hub
from envbuild_smoke.nodes.join import Joining, RefusedError, join
from envbuild_smoke.nodes.wire import MOST_GREETING_BYTES, TokenError, Wire, WireError, read_token

TOKEN, OTHER_TOKEN = b"t" * 32, b"o" * 32
STATED = Joining(plan_digest="sha256:1", nonce="n", smoke_digest=None, slots=8, host="h100-2")


class Head:
    """A hub that is updated in a thread until `wait_for` is true."""

    def __init__(self, nodes: int, refusal: Callable[[Joining], str]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.refused: list[str] = []
        self.messages: list[Any] = []
        self.hub = Hub(
            listener,
            nodes,
            TOKEN,
            admits=refusal,
            on_refused=self.refused.append,
            on_message=lambda agent, message: self.messages.append((agent.node, message)),
        )

    def update_until(self, condition: Callable[[], object], now: float = 0.0) -> None:
        while not condition():
            self.hub.update(now or time.monotonic())


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head(3, lambda joining: "" if joining.plan_digest == "sha256:1" else "its plan is another one")
    yield head
    head.hub.close()


@contextlib.contextmanager
def joining(head: Head, node: int, token: bytes = TOKEN, **stated: Any) -> Iterator[list[Any]]:
    """An agent that joins in a thread; gives the list with its connection, or the error, once there is one."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append(join(lambda: head.address, node, token, replace(STATED, **stated), limit_seconds=5))
        except (WireError, RefusedError) as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield ends
    thread.join()


def test_an_agent_joins_and_both_ends_send(head: Head) -> None:
    with joining(head, 1) as ends:
        head.update_until(lambda: ends and 1 in head.hub.agents)
    wire, agent = ends[0], head.hub.agents[1]
    assert (agent.joining.host, agent.joining.address, head.hub.missing) == ("h100-2", "127.0.0.1", (2,))
    wire.send({"event": "started", "key": 1})
    head.update_until(lambda: head.messages)
    assert head.messages == [(1, {"event": "started", "key": 1})]
    wire.close()
    head.update_until(lambda: agent.lost)
    # Closed or reset, as its last ping was read or not.
    assert "connection" in agent.lost.lower()


@pytest.mark.parametrize(
    ("node", "token", "stated", "expected"),
    [
        (1, OTHER_TOKEN, {}, "it does not have this run's token"),
        (3, TOKEN, {}, "the run has nodes 0 to 2"),
        (0, TOKEN, {}, "the run has nodes 0 to 2"),
        (1, TOKEN, {"plan_digest": "sha256:2"}, "its plan is another one"),
    ],
    ids=["token", "node beyond", "node 0", "plan"],
)
def test_agents_that_are_refused(head: Head, node: int, token: bytes, stated: dict[str, Any], expected: str) -> None:
    with joining(head, node, token, **stated) as ends:
        head.update_until(lambda: ends)
    assert str(ends[0]) == expected
    assert head.hub.agents == {}


def test_a_second_agent_of_a_node_is_refused(head: Head) -> None:
    for number in range(2):
        with joining(head, 2, host=f"host-{number}") as ends:
            head.update_until(lambda ends=ends: ends)
    assert str(ends[0]) == "node 2 has an agent already, on host-0"
    assert head.refused == ["node 2 (host-1): node 2 has an agent already, on host-0"]


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": 1}\n', b"x" * (MOST_GREETING_BYTES + 1), b"[" * 1000 + b"\n"],
    ids=["http", "list", "no nonce", "endless", "deep"],
)
def test_strangers_are_turned_away_and_the_run_goes_on(head: Head, sent: bytes) -> None:
    with socket.create_connection(head.address) as stranger:
        stranger.sendall(sent)
        head.update_until(lambda: head.refused)
    with joining(head, 1) as ends:
        head.update_until(lambda: ends and 1 in head.hub.agents)


def test_who_says_nothing_is_turned_away(head: Head) -> None:
    with socket.create_connection(head.address):
        head.hub.update(time.monotonic())
        head.hub.update(time.monotonic() + 60)
        assert "said nothing for 30 s" in head.refused[0]


def test_an_agent_that_falls_silent_is_lost(head: Head) -> None:
    with joining(head, 1) as ends:
        head.update_until(lambda: ends and 1 in head.hub.agents)
    head.hub.update(time.monotonic() + SILENCE_SECONDS + 1)
    assert head.hub.agents[1].lost == "it was silent for 20 s"


@pytest.mark.parametrize("change", ["forged", "repeated"])
def test_a_line_without_a_proof_ends_the_connection(change: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    here, peer = Wire(ours), Wire(theirs)
    here.authenticate(b"k", "head")
    peer.authenticate(b"k" if change == "repeated" else b"other", "agent")
    peer.send({"event": "done"})
    select.select([ours], [], [])
    line = ours.recv(4096)
    theirs.sendall(line)
    if change == "repeated":
        select.select([ours], [], [])
        assert here.receive() == [{"event": "done"}]
        theirs.sendall(line)
    select.select([ours], [], [])
    with pytest.raises(WireError, match="without a proof"):
        here.receive()


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (b"t" * 32, 0o640, "by other accounts \\(mode 640\\)"),
        (b"short", 0o600, "has 5 bytes"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_token_files_that_are_refused(tmp_path: Path, content: bytes | None, mode: int, expected: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(TokenError, match=expected):
        read_token(path)


def test_the_shortest_round_trip_tells_the_offset() -> None:
    clock = ClockOffset()
    # Theirs is 100 s behind; the first answer waited for 2 s on its way back, the second for nothing.
    clock.measured(10.0, -89.9, 12.2)
    clock.measured(20.0, -79.9, 20.2)
    assert (clock.seconds, clock.round_trip) == pytest.approx((100.0, 0.2))


def test_lines_are_json_alone(head: Head) -> None:
    with joining(head, 1) as ends:
        head.update_until(lambda: ends and 1 in head.hub.agents)
    # It is pinged again and again, where the first ping was sent before the peer had joined.
    head.update_until(lambda: select.select([ends[0]], [], [], 0)[0])
    received = ends[0]._socket.recv(4096)
    _, _, text = received.partition(b" ")
    assert json.loads(text)["command"] == "ping"
