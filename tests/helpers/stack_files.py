"""A project's own envs/: a base for this machine's Python 3.11, targets, and stacks written from dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

BASE = "small"
GPU_BASE = "small-cu130"


def write_base(
    project: Path, name: str = BASE, *, glibc: str = "2.36", cuda: str | None = None, python: str = "3.11"
) -> None:
    """A base like Debian 12; torch's build is the package index's own where it has CUDA."""
    definition: dict[str, Any] = {
        "summary": "a test's own",
        "distribution": "debian",
        "release": "12",
        "platform": "linux/amd64",
        "glibc": glibc,
        "python": {"version": python, "source": "base", "executable": f"/usr/bin/python{python}"},
        "torch": {"build": "index" if cuda else "cpu"},
        "obtain": {
            "method": "mmdebstrap",
            "suite": "bookworm",
            "components": ["main"],
            "packages": ["python3.11"],
        },
    }
    _write(project / "envs/bases" / f"{name}.toml", definition | ({"cuda": cuda} if cuda else {}))


def write_vendor_base(project: Path, name: str, *, provides: Mapping[str, str], digest: str | None = None) -> None:
    """A base that is a vendor's image on a registry: it brings packages, and a Python of its own."""
    obtain = {"method": "oci", "image": "registry.example.invalid/vendor/pytorch:25.09-py3"}
    definition: dict[str, Any] = {
        "summary": "a vendor's image",
        "distribution": "ubuntu",
        "release": "24.04",
        "platform": "linux/amd64",
        "glibc": "2.39",
        "cuda": "13.0",
        "python": {"version": "3.11", "source": "prefix", "executable": "/opt/python/bin/python3"},
        "torch": {"build": "index"},
        "provides": dict(provides),
        "obtain": obtain | ({"digest": digest} if digest else {}),
    }
    _write(project / "envs/bases" / f"{name}.toml", definition)


def write_target(project: Path, name: str, *, sm: tuple[str, ...] = (), driver: str | None = None) -> None:
    """A target on linux/amd64."""
    definition: dict[str, Any] = {"summary": "a test's own", "platform": "linux/amd64"}
    definition |= {"device": "cuda", "sm": list(sm)} if sm else {"device": "cpu"}
    _write(project / "envs/targets" / f"{name}.toml", definition | ({"driver": driver} if driver else {}))


def write_stack(
    project: Path,
    name: str,
    components: Mapping[str, Mapping[str, Any]],
    *,
    target: str = "cpu",
    base: str = BASE,
    **more: Any,
) -> None:
    """A stack for one target on one base; ``more`` are keys such as ``anchor``, ``as_of``, ``requirements``."""
    definition = {
        "summary": "a test's own",
        "driver": "mcore",
        "matrix": "certify-quick",
        "builds": [{"target": target, "bases": [base], "default_base": base}],
        "components": components,
        **more,
    }
    _write(project / "envs/stacks" / f"{name}.toml", definition)


def _write(path: Path, definition: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomlkit.dumps(definition))
