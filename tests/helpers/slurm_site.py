"""`certify --on` against the virtual cluster, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.processes import wait_until
from helpers.slurm_cluster import Cluster
from helpers.slurm_project import NAME

if TYPE_CHECKING:
    from conftest import Tool

# The command line with a test's own runner.
START = """\
import sys
from pathlib import Path
from envbuild.certify.run import job
from envbuild.cli.main import main
from envbuild.core.digests import sha256_file
if runner := {runner!r}:
    job.smoke_file = lambda store: (Path(runner), sha256_file(Path(runner)))
sys.argv = ["envbuild", *{words!r}]
main()
"""


@dataclass(frozen=True)
class Site:
    """A virtual cluster, and the command line in a project that has its file.

    Attributes:
        storage: the cluster's folder.
        command: the certification, without where it runs.
        runner: in the place of the real one.
        nodes: of a job.
    """

    cluster: Cluster
    tool: Tool
    storage: Path
    command: tuple[str, ...]
    runner: Path | None = None
    nodes: int = 2

    @property
    def out(self) -> Path:
        return self.tool.project / "out"

    def words(self, *words: str) -> list[str]:
        return [*self.command, "--out-dir", "out", "--on", NAME, "--nodes", str(self.nodes), *words]

    def certify(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.tool.run(*self.words(*words), status=status)

    def slurm(self, *words: str) -> str:
        return self.cluster.run(*words, cwd=self.storage).stdout

    def state(self, number: str) -> str:
        return re.search(r"JobState=(\S+)", self.slurm("scontrol", "show", "job", number))[1]  # type: ignore[index]

    def start_again(self, number: str) -> None:
        """Once a job was put back: Slurm waits two minutes before it starts it again, unless it is told.

        Not at once: a node refuses a job that began in the second in which it was told that the job is over.
        """
        wait_until(lambda: self.state(number) == "PENDING", 100)
        self.slurm("scontrol", "update", f"job={number}", "starttime=now+5seconds")

    @contextlib.contextmanager
    def started(self, *words: str, line: Sequence[str] = (), results: bool = True) -> Iterator[subprocess.Popen[str]]:
        """The command in a process of its own, once its job was submitted and has written its first line."""
        code = START.format(runner=str(self.runner or ""), words=line or self.words(*words))
        environment = self.tool.environment()
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=self.tool.project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: self.run_folder if results else [*self.out.glob("certificates/*/*/run/job.json")])
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def run_folder(self) -> Path | None:
        """The folder of the only run, once it has results."""
        folders = [path.parents[1] for path in self.storage.glob("runs/*/results/results.jsonl")]
        return folders[0] if folders else None
