"""An image that takes seconds where its base is there: the small stack, built once in the session's store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.mini import NAME, image_of, write_stack


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory, site_cache: Path) -> Tool:
    """The command line in a project with the small stack, locked."""
    project = tmp_path_factory.mktemp("mini")
    write_stack(project)
    tool = Tool(project, site_cache)
    tool.run("lock", "--stack", NAME, "--target", "cpu")
    return tool


@pytest.fixture(scope="session")
def mini_image(mini: Tool) -> dict[str, Any]:
    """What ``envbuild image --json`` says of the small stack's image."""
    return image_of(mini)
