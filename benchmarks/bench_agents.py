"""A thousand agents join one node 0 over loopback, and one of them falls silent.

Node 0 is a process with the runner's own hub; the agents share one process, prove the token, and answer pings as an
agent does, without training. Exits 1 when they take longer than 60 s to join, node 0 needs more than 300 MB, or the
silent one is not named within 30 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

from envbuild_smoke.nodes.hub import Hub
from envbuild_smoke.nodes.join import Joining, join
from envbuild_smoke.nodes.wire import Wire, WireError

JOIN_LIMIT_SECONDS = 60.0
NAME_LIMIT_SECONDS = 30.0
MEMORY_LIMIT_MB = 300.0
# Agents that connect at once: a thread each.
AT_ONCE = 64
STATED = Joining(plan_digest="sha256:0", nonce="n", smoke_digest=None, slots=8, host="")


def head(count: int, token: bytes) -> None:
    """Be node 0: print the port, when all have joined, and which agent was lost."""
    refusals: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        hub = Hub(
            listener,
            count + 1,
            token,
            admits=lambda joining: "" if joining.plan_digest == STATED.plan_digest else "another plan",
            on_refused=refusals.append,
            on_message=lambda *_: None,
        )
        while hub.missing:
            hub.update(time.monotonic())
            time.sleep(0.001)
        print("joined", flush=True)
        while not (lost := [agent.label for agent in hub.agents.values() if agent.lost]):
            hub.update(time.monotonic())
            time.sleep(0.05)
    # ru_maxrss is in KiB on Linux (getrusage(2)).
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"lost": lost, "refused": refusals, "memory_mb": memory}), flush=True)


def joined(port: int, token: bytes, count: int) -> list[Wire]:
    """Have all agents join; return their connections, in the order of their nodes."""
    wires: dict[int, Wire] = {}

    def run(first: int) -> None:
        for node in range(first, count + 1, AT_ONCE):
            stated = replace(STATED, host=f"node-{node}")
            wires[node] = join(lambda: ("127.0.0.1", port), node, token, stated, limit_seconds=JOIN_LIMIT_SECONDS)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(1, AT_ONCE + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [wires[node] for node in sorted(wires)]


def answer_pings(wires: list[Wire]) -> None:
    """Answer until node 0 closes the connections, as an agent does."""
    with contextlib.suppress(WireError), selectors.DefaultSelector() as selector:
        for wire in wires:
            selector.register(wire, selectors.EVENT_READ, wire)
        while True:
            for key, _ in selector.select():
                for message in key.data.receive():
                    if message.get("command") == "ping":
                        now = time.monotonic()
                        key.data.send(
                            {"event": "pong", "sent": message["sent"], "monotonic_seconds": now, "time_of_day": now}
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--head", metavar="TOKEN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head:
        head(options.agents, bytes.fromhex(options.head))
        return 0
    # Descriptors of the agents, of which each is one here and one in node 0.
    wanted = options.agents + 100
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    token = secrets.token_bytes(32)
    command = [sys.executable, __file__, "--agents", str(options.agents), "--head", token.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node_0:
        assert node_0.stdout is not None
        port = int(node_0.stdout.readline())
        began = time.monotonic()
        wires = joined(port, token, options.agents)
        if node_0.stdout.readline() != "joined\n":
            raise SystemExit("node 0 ended before all had joined")
        joining = time.monotonic() - began
        silent = options.agents // 2
        answering = threading.Thread(target=answer_pings, args=(wires[:silent] + wires[silent + 1 :],))
        answering.start()
        began = time.monotonic()
        report = json.loads(node_0.stdout.readline())
        naming = time.monotonic() - began
        answering.join()
    name = f"node {silent + 1} (node-{silent + 1})"
    right = report["lost"] == [name] and not report["refused"]
    print(f"{options.agents} agents joined in {joining:.1f} s (at most {JOIN_LIMIT_SECONDS:g})")
    print(f"node 0: {report['memory_mb']:.0f} MB (at most {MEMORY_LIMIT_MB:g})")
    print(f"lost: {', '.join(report['lost'])}, named after {naming:.1f} s (at most {NAME_LIMIT_SECONDS:g})")
    within = joining <= JOIN_LIMIT_SECONDS and naming <= NAME_LIMIT_SECONDS and report["memory_mb"] <= MEMORY_LIMIT_MB
    return int(not (right and within))


if __name__ == "__main__":
    sys.exit(main())
