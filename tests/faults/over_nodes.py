"""A run over nodes that are processes of this machine, with faults of their own, judged without the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.environments import Environment
from faults.harness import FAILED, PASSED, Outcome

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.nodes import number_problems
from envbuild.certify.judge.results import read_results
from envbuild.certify.judge.slow_nodes import slow_node_problems
from envbuild.certify.run.plan import Environment as Planned
from envbuild.certify.run.plan import Network, Subject, make_plan
from envbuild.certify.run.run import CASES_FAILED, COMPLETED
from envbuild.core.digests import sha256_bytes
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.reader import parse_plan

CPU = Capabilities(device=Device.CPU)
SUBJECT = Subject(
    name="faults",
    stack="mcore",
    base="debian12",
    target="cpu",
    lock_digest=sha256_bytes(b"lock"),
    place=Placement.parse("venv"),
)


@dataclass(frozen=True)
class Cluster:
    """As many nodes as a test asks for, whose jobs have this environment."""

    environment: Environment
    project: Path
    scratch: Path

    def certify(self, matrix_name: str, network: Network, nodes: Sequence[Environment | str]) -> Outcome:
        """Train the cases of a matrix, and measure what the network of the cluster's file asks for.

        Args:
            nodes: of each, the faults that the switch plants there, or an environment of its own.
        """
        matrix = Catalog.open(self.project).matrix(matrix_name)
        cases = expand(matrix, matrix_name, CPU)
        planned = Planned(capabilities=CPU, driver=Driver.MCORE, versions=self.environment.versions)
        content = json.dumps(make_plan(SUBJECT, planned, matrix, cases, network=network)).encode()
        self.scratch.mkdir()
        (self.scratch / "plan.json").write_bytes(content)
        (self.scratch / "token").write_text("0123456789abcdef" * 4)
        (self.scratch / "token").chmod(0o600)
        began = time.monotonic()
        running = [self._start(rank, len(nodes), own) for rank, own in enumerate(nodes)]
        words = [node.communicate(timeout=600)[1] for node in running]
        # Cases failed, or none was started as the nodes differ: the results tell.
        assert {node.returncode for node in running} <= {COMPLETED, CASES_FAILED}, words
        seconds = time.monotonic() - began
        plan = parse_plan(content)
        results = read_results(self.scratch / "out" / "results.jsonl", plan)
        # Nothing is judged by time on CPUs. These nodes are so slow that it can be.
        slow = slow_node_problems(dataclasses.replace(plan, device="cuda"), results)
        problems = [*run_problems(plan, results), *number_problems(matrix, plan, results), *slow]
        failed = [verdict for verdict in judge(cases, matrix, results, plan) if not verdict.passed]
        error = {
            "problems": [problem.model_dump() for problem in problems],
            "cases": [verdict.model_dump() for verdict in failed],
        }
        status = FAILED if problems or failed else PASSED
        return Outcome(status=status, document={"error": error}, words="\n".join(words), seconds=seconds)

    def _start(self, rank: int, nodes: int, own: Environment | str) -> subprocess.Popen[str]:
        words = ["run", "--plan", "plan.json", "--out", "out", "--token-file", "token", "--head", "127.0.0.1:0"]
        words += ["--nodes", str(nodes), "--node-rank", str(rank)]
        environment, fault = (self.environment, own) if isinstance(own, str) else (own, "")
        variables = {"PYTHONPATH": str(data_root() / "smoke"), "ENVBUILD_FAULT": fault}
        return subprocess.Popen(
            [environment.python, "-m", "envbuild_smoke", *words],
            cwd=self.scratch,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
