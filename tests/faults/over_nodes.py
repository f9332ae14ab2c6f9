"""A run over several nodes, each a process of this machine with faults of its own, judged without the command line."""

from __future__ import annotations

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
from envbuild.catalog.cluster import Floors
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.judge import run_problems
from envbuild.certify.judge.results import read_results
from envbuild.certify.run.plan import Environment as Planned
from envbuild.certify.run.plan import Network, Subject, make_plan
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

    def certify(self, matrix_name: str, transport: str, faults: Sequence[str]) -> Outcome:
        """Train the baselines of a matrix and measure the network, on a node for each of ``faults``."""
        matrix = Catalog.open(self.project).matrix(matrix_name)
        cases = tuple(case for case in expand(matrix, matrix_name, CPU) if case.is_baseline)
        network = Network(nodes=len(faults), floors=Floors(), transport=transport)
        planned = Planned(capabilities=CPU, driver=Driver.MCORE, versions=self.environment.versions)
        content = json.dumps(make_plan(SUBJECT, planned, matrix, cases, network=network)).encode()
        self.scratch.mkdir()
        (self.scratch / "plan.json").write_bytes(content)
        (self.scratch / "token").write_text("0123456789abcdef" * 4)
        (self.scratch / "token").chmod(0o600)
        began = time.monotonic()
        nodes = [self._start(rank, len(faults), fault) for rank, fault in enumerate(faults)]
        words = [node.communicate(timeout=600)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [0] * len(nodes), words
        seconds = time.monotonic() - began
        plan = parse_plan(content)
        problems = run_problems(plan, read_results(self.scratch / "out" / "results.jsonl", plan))
        document = {"error": {"problems": [problem.model_dump() for problem in problems]}}
        status = FAILED if problems else PASSED
        return Outcome(status=status, document=document, words="\n".join(words), seconds=seconds)

    def _start(self, rank: int, nodes: int, fault: str) -> subprocess.Popen[str]:
        words = ["run", "--plan", "plan.json", "--out", "out", "--token-file", "token", "--head", "127.0.0.1:0"]
        words += ["--nodes", str(nodes), "--node-rank", str(rank)]
        own = {"PYTHONPATH": str(data_root() / "smoke"), "ENVBUILD_FAULT": fault}
        return subprocess.Popen(
            [self.environment.python, "-m", "envbuild_smoke", *words],
            cwd=self.scratch,
            env={**os.environ, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
