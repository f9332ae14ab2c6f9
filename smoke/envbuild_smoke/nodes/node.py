"""A node other than 0, from its start to its end."""

import fcntl
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from envbuild_smoke.environment.findings import file_findings
from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.nodes.agent import Agent, LostHeadError
from envbuild_smoke.nodes.head import JOIN_SECONDS, PORT_FILE
from envbuild_smoke.nodes.join import RETRY_SECONDS, Joining, RefusedError, decline, join
from envbuild_smoke.nodes.wire import WireError
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.run.background import result_of
from envbuild_smoke.run.context import RunContext, RunInterruptedError
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.options import Options
from envbuild_smoke.run.pool import Pool
from envbuild_smoke.run.results import Emit
from envbuild_smoke.run.run_header import host_name, node_state, smoke_digest

# From linux/sockios.h; Python has no binding of it.
_SIOCGIFADDR = 0x8915


def run_node(pool: Pool, options: Options, on_node: int, emit: Emit, stop: threading.Event) -> None:
    """Join node 0's run and serve it to its end.

    Raises LostHeadError when node 0 is not there, refuses this node, or is gone before the end; RunInterruptedError.
    """
    plan, out = pool.plan, pool.out
    host, port = options.head
    stated = Joining(
        plan_digest=plan.digest, nonce=plan.nonce, smoke_digest=smoke_digest(), slots=on_node, host=host_name()
    )
    try:
        # A run that is resumed has the port of its first part there, until node 0 listens again.
        wire = join(
            lambda: (host, port or _port(out, stop)),
            options.node_rank,
            options.token,
            stated,
            limit_seconds=60.0 if port else JOIN_SECONDS,
        )
    except RefusedError as error:
        raise LostHeadError(f"node 0 refuses this node: {error}") from error
    except WireError as error:
        raise LostHeadError(f"node 0 ({host}): {error}") from error
    pool.host = wire.address
    pool.variables = {**pool.variables, **address_variables(plan, pool.host)}
    emit({"event": "joined", "node": options.node_rank})
    context = RunContext(plan=plan, out=out, options=options, pool=pool, emit=emit, stop=stop, on_node=on_node)
    agent = Agent(wire, pool, context, on_node)
    pool.start_server()
    try:
        # Node 0 is answered meanwhile: reading an image's files and importing take longer than it waits for an answer.
        listed, files = result_of(
            lambda: (ListedFiles(plan.expected_versions, plan.provided_packages), file_findings(plan)), agent.update
        )
        ready = context.wait_for_fork_server(agent.update)
        state = result_of(lambda: node_state(context, ready, files, listed, None), agent.update)
    except ForkServerError as error:
        agent.update()
        raise LostHeadError(f"this node cannot start ranks: {error}") from error
    except WireError as error:
        raise LostHeadError(f"node 0: {error}") from error
    agent.send({"event": "state", "state": asdict(state)})
    agent.serve()


def tell_head(options: Options, out: Path, why: str, stop: threading.Event) -> None:
    """Tell node 0 that this node cannot take part; it would wait for it. Where that is impossible, node 0 does wait."""
    host, port = options.head
    with suppress(WireError, RunInterruptedError):
        text = f"{why} (on {host_name()})"
        decline(
            lambda: (host, port or _port(out, stop)), options.node_rank, options.token, text, limit_seconds=JOIN_SECONDS
        )


def _port(out: Path, stop: threading.Event) -> int:
    """Return the port that node 0 has written into the results folder. Raises WireError when it does not."""
    limit = time.monotonic() + JOIN_SECONDS
    while not stop.is_set():
        try:
            return int((out / PORT_FILE).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            if time.monotonic() > limit:
                raise WireError(f"{out / PORT_FILE} did not come within {JOIN_SECONDS:g} s") from error
        time.sleep(RETRY_SECONDS)
    raise RunInterruptedError


def address_variables(plan: Plan, address: str) -> dict[str, str]:
    """Return the variables that have ranks talk to each other by the interface that has this address."""
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name} if plan.device == "cpu" and name else {}


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; "" if none has it (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
