"""The bench on which faults are planted: a project with the lock of stack mcore, and environments to break."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Tool
from faults.bench import Bench
from faults.environments import Environment
from faults.record import Record


@pytest.fixture(scope="session")
def bench(tool: Tool, stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    # Compiled once here, and not again in each copy.
    subprocess.run([stack_python, "-c", "import torch, megatron.core.models.gpt"], check=True, capture_output=True)
    stack = Environment(stack_python.parent.parent)
    return Bench(project=tool.project, cache=tool.cache, stack=stack, scratch=tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def record(bench: Bench) -> Iterator[Record]:
    """What was found in this session, written to the file that ENVBUILD_SOAK_RECORD names."""
    found = Record(bench.stack)
    yield found
    found.write()
