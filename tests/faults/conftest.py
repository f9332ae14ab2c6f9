"""The harness on which faults are planted: a project with the lock of stack mcore, and environments to break."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import Tool
from faults.environments import Environment
from faults.harness import Harness
from faults.record import Record

from envbuild.catalog.data import data_root


@pytest.fixture(scope="session")
def harness(tool: Tool, stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    # Compiled once here, and not again in each copy and each run: most of what a run would do.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = str(data_root() / "smoke")
    done = subprocess.run([stack_python, "-c", "import envbuild_smoke.drivers.mcore"], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    stack = Environment(stack_python.parent.parent)
    return Harness(project=tool.project, cache=tool.cache, stack=stack, scratch=tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def record(harness: Harness) -> Record:
    """What was found in this session; ENVBUILD_SOAK_RECORD names a file for it."""
    return Record(harness.stack)
