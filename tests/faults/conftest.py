"""The harness on which faults are planted: a project with the lock of stack mcore, and environments to break."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Tool
from faults.environments import Environment
from faults.harness import Harness
from faults.record import Record


@pytest.fixture(scope="session")
def harness(tool: Tool, stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    stack = Environment(stack_python.parent.parent)
    return Harness(project=tool.project, cache=tool.cache, stack=stack, scratch=tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def record(harness: Harness) -> Record:
    """What was found in this session; ENVBUILD_SOAK_RECORD names a file for it."""
    return Record(harness.stack)
