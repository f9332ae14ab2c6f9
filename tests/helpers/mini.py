"""A stack that installs in a second: two small packages, one of them with compiled code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Tool

NAME = "mini"
STACK = """\
summary = "two small packages"
driver = "mcore"
matrix = "certify-quick"

[[builds]]
target = "cpu"
bases = ["debian12", "ubuntu2204", "ubuntu2404"]
default_base = "host"

[components.packaging]
version = "==25.0"
modules = ["packaging.version"]

[components.psutil]
version = "==7.0.0"
modules = ["{module}"]
"""


def write_stack(project: Path, module: str = "psutil", name: str = NAME) -> None:
    """Define the stack in a project's own envs/; ``module`` is one that must import."""
    file = project / "envs/stacks" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(STACK.replace("{module}", module))


def image_of(tool: Tool, *arguments: str, out: str = "out") -> dict[str, Any]:
    """Build the stack's image with the command line; what ``--json`` printed."""
    done = tool.run("image", "--stack", NAME, "--target", "cpu", "--json", "--out-dir", out, *arguments)
    result: dict[str, Any] = json.loads(done.stdout)
    return result
