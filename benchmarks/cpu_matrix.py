"""The CPU matrix as the runner takes it: a plan, the zipapp, and an environment with the stack."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.run.plan import Environment, Network, Subject, make_plan
from envbuild.launch.launchers import Placement
from envbuild.sync.zipapp import smoke_bytes

ROOT = Path(__file__).resolve().parents[1]
NO_DIGEST = "sha256:" + "0" * 64


def write_plan(path: Path, matrix_name: str, *, nodes: int = 1, processes: int | None = None) -> int:
    """Write the plan of a matrix for the CPU; return the number of cases.

    Args:
        nodes: that the run has.
        processes: the most that a case has on a node; None: any number.
    """
    matrix = Catalog.open(ROOT).matrix(matrix_name)
    capabilities = Capabilities(device=Device.CPU)
    cases = tuple(
        case
        for case in expand(matrix, matrix_name, capabilities)
        if case.most_nodes <= nodes and (processes is None or case.slots_on_node <= processes)
    )
    # Without an image: the runner refuses the plan of one that it is not started in.
    place = Placement.parse("venv")
    subject = Subject(name="bench", stack="mcore", base="here", target="cpu", lock_digest=NO_DIGEST, place=place)
    environment = Environment(capabilities=capabilities, driver=Driver.MCORE)
    plan = make_plan(subject, environment, matrix, cases, network=Network(nodes=nodes))
    path.write_text(json.dumps(plan), encoding="utf-8")
    return len(cases)


def installed(folder: Path) -> Path:
    """Install the lock of stack mcore for the CPU below a folder; return its Python."""
    into = folder / "environment"
    command = [sys.executable, "-m", "envbuild", "sync", "--stack", "mcore", "--target", "cpu", "--into", str(into)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return into / "bin" / "python"


@dataclass(frozen=True)
class Bench:
    """What a benchmark of the runner starts from.

    Attributes:
        run: the runner's words up to and with --out.
        count: of the matrix's cases.
    """

    work: Path
    run: list[str | Path]
    count: int


def options_of(text: str | None) -> argparse.ArgumentParser:
    """Return the options that these benchmarks share."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of an environment with the stack mcore for the CPU")
    parser.add_argument("--matrix", default="certify-quick")
    return parser


@contextmanager
def prepared(python: Path | None, matrix: str) -> Iterator[Bench]:
    """Write plan and runner into a folder that goes at the end; install the environment where none was named."""
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-") as name:
        work = Path(name)
        smoke, plan = work / "smoke.pyz", work / "plan.json"
        smoke.write_bytes(smoke_bytes())
        count = write_plan(plan, matrix)
        yield Bench(work, [python or installed(work), "-I", smoke, "run", "--plan", plan, "--out"], count)
