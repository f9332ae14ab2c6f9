"""The CPU matrix as the runner takes it: a plan, the zipapp, and an environment with the stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Device, Driver
from envbuild.certify.cases import expand
from envbuild.certify.ground import Ground
from envbuild.certify.plan import Expected, Subject, make_plan

ROOT = Path(__file__).resolve().parents[1]
NO_DIGEST = "sha256:" + "0" * 64


def write_plan(path: Path, matrix_name: str) -> int:
    """Write the plan of a matrix for the CPU; return the number of cases."""
    matrix = Catalog.open(ROOT).matrix(matrix_name)
    ground = Ground(device=Device.CPU)
    cases = expand(matrix, matrix_name, ground)
    digests = {"lock_digest": NO_DIGEST, "oci_digest": NO_DIGEST, "sqsh_digest": NO_DIGEST}
    subject = Subject(name="bench", stack="mcore", base="here", target="cpu", **digests)
    plan = make_plan(
        subject=subject, ground=ground, driver=Driver.MCORE, matrix=matrix, cases=cases, expected=Expected()
    )
    path.write_text(json.dumps(plan), encoding="utf-8")
    return len(cases)


def environment(folder: Path) -> Path:
    """Install the lock of stack mcore for the CPU below a folder; return its Python."""
    into = folder / "environment"
    command = [sys.executable, "-m", "envbuild", "sync", "--stack", "mcore", "--target", "cpu", "--into", str(into)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return into / "bin" / "python"
