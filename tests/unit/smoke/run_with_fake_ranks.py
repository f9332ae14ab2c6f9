"""The real command line with the fake rank program, for tests that send signals to it."""

import os
import threading
from dataclasses import replace

from envbuild_smoke import cli, runner
from envbuild_smoke.nodes import canary, node
from envbuild_smoke.nodes.agent import Agent
from envbuild_smoke.nodes.node_pools import NodePools
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run import sweep

canary.LIMIT_SECONDS = 5.0
sweep.LIMIT_SECONDS = 4.0
FAKE = RankProgram(tasks="fake_ranks")
real_run_plan = runner.run_plan


def run_plan(*arguments, options, **more):  # type: ignore[no-untyped-def]
    return real_run_plan(*arguments, options=replace(options, program=FAKE), **more)


def describe_only_while_others_are_answered() -> None:
    """Reading what runs on a node does not end before the node has answered others meanwhile."""
    answered = threading.Event()

    def answering(original):  # type: ignore[no-untyped-def]
        return lambda *arguments: (original(*arguments), answered.set())[0]

    def described(original):  # type: ignore[no-untyped-def]
        def describe(*arguments):  # type: ignore[no-untyped-def]
            answered.clear()
            assert answered.wait(20), "nobody was answered"
            return original(*arguments)

        return describe

    Agent.update, NodePools.wait = answering(Agent.update), answering(NodePools.wait)  # type: ignore[method-assign]
    runner.node_state, node.node_state = described(runner.node_state), described(node.node_state)


if __name__ == "__main__":
    if os.environ.get("FAKE_STATE") == "waits":
        describe_only_while_others_are_answered()
    runner.run_plan = run_plan
    cli.run_and_exit()
