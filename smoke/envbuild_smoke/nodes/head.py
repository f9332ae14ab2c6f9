"""Node 0's part of a run over several nodes: waits until the agents have joined, and have its results folder."""

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from envbuild_smoke.nodes import canary
from envbuild_smoke.nodes.hub import Hub
from envbuild_smoke.nodes.join import Joining
from envbuild_smoke.nodes.node_pools import NodePools
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.run.context import POLL_SECONDS, RunInterruptedError
from envbuild_smoke.run.options import Options
from envbuild_smoke.run.pool import Pool
from envbuild_smoke.run.results import Emit
from envbuild_smoke.run.run_header import smoke_digest

# Agents start when their nodes have unpacked the image, which takes minutes where many do so at once.
JOIN_SECONDS = 900.0
# In the results folder: the port that node 0 listens at, where the launcher left the choice to it.
PORT_FILE = "head.port"


class NodesError(Exception):
    """The nodes of the run cannot train together."""


def open_nodes(pool: Pool, options: Options, on_node: int, emit: Emit, stop: Callable[[], bool]) -> NodePools:
    """Listen, wait until the agents of all other nodes have joined, and return the pools of all nodes.

    Raises NodesError when some cannot take part, do not come in time, or do not have this results folder.
    """
    plan, out = pool.plan, pool.out
    listener = socket.create_server((options.head[0], options.head[1]), backlog=1024)
    port = listener.getsockname()[1]
    pools = NodePools(pool, on_node)

    def refused(why: str) -> None:
        emit({"event": "agent-refused", "message": why})

    hub = Hub(
        listener,
        options.nodes,
        options.token,
        admits=lambda joining: refusal(joining, plan, on_node),
        on_refused=refused,
        on_message=pools.received,
    )
    pools.attach(hub)
    # Whole before it has its name: agents look for it.
    partial = out / f"{PORT_FILE}.partial"
    partial.write_text(f"{port}\n", encoding="ascii")
    partial.replace(out / PORT_FILE)
    emit({"event": "listening", "host": options.head[0], "port": port, "nodes": options.nodes})
    limit = time.monotonic() + JOIN_SECONDS
    while hub.missing:
        if stop():
            raise RunInterruptedError
        if hub.unable:
            raise NodesError("; ".join(f"node {node}: {why}" for node, why in sorted(hub.unable.items())))
        if time.monotonic() > limit:
            missing = ", ".join(map(str, hub.missing))
            raise NodesError(
                f"of {options.nodes} nodes, these did not join within {JOIN_SECONDS:g} s: {missing}. The log of the "
                "job's step on each tells why; a firewall between nodes has to let them connect to node 0"
            )
        pools.wait(POLL_SECONDS)
    _check_folder(pools, out, stop)
    return pools


def refusal(joining: Joining, plan: Plan, on_node: int) -> str:
    """Return why an agent is refused: it does not run what node 0 runs; "" if it does."""
    for what, theirs, ours in (
        ("plan", (joining.plan_digest, joining.nonce), (plan.digest, plan.nonce)),
        ("runner", joining.smoke_digest, smoke_digest()),
    ):
        if theirs != ours:
            return f"its {what} is another one than node 0's"
    if joining.slots != on_node:
        return f"it has {joining.slots} GPUs or slots for this run, and node 0 has {on_node}"
    return ""


def _check_folder(pools: NodePools, out: Path, stop: Callable[[], bool]) -> None:
    """Raise NodesError unless all nodes see what node 0 writes into the results folder, and it sees what they do."""
    content = secrets.token_hex(16)
    names = {node: f"{canary.name_of_canary(content[:8])}-{node}" for node in pools.nodes}
    for name in names.values():
        canary.write(out, name, content)
    limit = time.monotonic() + canary.LIMIT_SECONDS + 20
    pools.ask_for_canaries(names, content)
    while time.monotonic() < limit and len(pools.canaries) + len(pools.lost) < len(names):
        if stop():
            raise RunInterruptedError
        pools.wait(POLL_SECONDS)
    if pools.lost:
        raise NodesError("; ".join(pools.lost.values()))
    apart = sorted(node for node, name in names.items() if not pools.canaries.get(node) or not _gone(pools, out, name))
    for name in names.values():
        (out / name).unlink(missing_ok=True)
    if apart:
        raise NodesError(
            f"the results folder {out} is not the same on node {', '.join(map(str, apart))} as on node 0: "
            "--out has to lie on storage that all nodes share"
        )


def _gone(pools: NodePools, out: Path, name: str) -> bool:
    limit = time.monotonic() + canary.LIMIT_SECONDS
    while (out / name).exists():
        if time.monotonic() > limit:
            return False
        # The other nodes are answered meanwhile.
        pools.wait(POLL_SECONDS)
    return True
