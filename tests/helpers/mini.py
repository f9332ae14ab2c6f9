"""A stack that installs in a second: two small packages, one of them with compiled code."""

from __future__ import annotations

from pathlib import Path

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
