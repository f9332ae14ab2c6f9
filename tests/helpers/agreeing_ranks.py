"""A rank program that trains nothing: its ranks wait for each other in each step, over sockets, and report what agrees.

Zipped into the runner. It needs only the standard library, and :mod:`fake_runner`.
"""

import json
import socket
import time

from envbuild_smoke import fake_runner
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import CaseLine

STEP_SECONDS = 1.0


def case(context: RankContext) -> None:
    line = _line(context)
    if context.case.baseline is None:
        context.checkpoint.mkdir(parents=True, exist_ok=True)
        context.report(weights_saved=True)
    peers = _meet(context)
    for step in line.steps:
        time.sleep(STEP_SECONDS)
        _wait_for(peers, first=context.rank == 0)
        if context.rank == 0:
            context.report_step(step)
    if context.rank == 0:
        context.report(observed=line.observed, gradients=line.gradients, reference=line.reference)
        context.report(perturbed=line.perturbed, weights=line.weights)


def _line(context: RankContext) -> CaseLine:
    folder = next(folder for folder in context.out.parents if (folder / "plan.json").is_file())
    plan = json.loads((folder / "plan.json").read_text())
    planned = next(case for case in plan["cases"] if case["id"] == context.case.id)
    return read_object(CaseLine, fake_runner.case_line(plan, planned), "a case")


def _meet(context: RankContext) -> list[socket.socket]:
    """The connections of rank 0 to all others, and of those to it."""
    if context.rank:
        return [socket.create_connection((context.host, context.port), timeout=300)]
    assert context.listener is not None
    with socket.socket(fileno=context.listener) as listener:
        return [listener.accept()[0] for _ in range(context.case.world_size - 1)]


def _wait_for(peers: list[socket.socket], *, first: bool) -> None:
    """Rank 0 hears all others, and answers them."""
    for peer in peers:
        peer.settimeout(None)
        if not first:
            peer.sendall(b"1")
        assert peer.recv(1), "a rank is gone"
    for peer in peers if first else ():
        peer.sendall(b"0")
