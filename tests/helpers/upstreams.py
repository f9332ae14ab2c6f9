"""Small git repositories shaped like NeMo, Megatron-Bridge and Megatron-LM, under addresses that do not exist."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from helpers.git_repos import Content, History

PUBLIC = "https://git.example.invalid"
NEMO_URL, MCORE_URL = f"{PUBLIC}/NVIDIA-NeMo/NeMo", f"{PUBLIC}/NVIDIA/Megatron-LM"
BRIDGE_URL = f"{PUBLIC}/NVIDIA-NeMo/Megatron-Bridge"
SETUPTOOLS = {"version": "<81", "reason": "what builds the packages from git"}


def project_files(name: str, version: str, package: str, needs: tuple[str, ...] = ()) -> dict[str, Content]:
    """A pure Python project that setuptools builds."""
    return {
        "pyproject.toml": '[build-system]\nrequires = ["setuptools>=61"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(needs)}\n'
        f'[tool.setuptools]\npackages = ["{package}"]\n',
        f"{package.replace('.', '/')}/__init__.py": f'__version__ = "{version}"\n',
    }


def manifest(megatron: str) -> str:
    entries = {
        "megatron-lm": {"repo": MCORE_URL, "ref": megatron},
        "apex": {"repo": f"{PUBLIC}/NVIDIA/apex", "ref": "0" * 40},
    }
    return json.dumps({"ngc-pytorch": "x", "vcs-dependencies": entries, "pypi-dependencies": {}})


@dataclass
class Upstream:
    """NeMo and Megatron-LM: two releases of the one, three commits of the other that its manifest names."""

    folder: Path
    nemo: History
    megatron: History
    commits: dict[str, str]


def made(path: Path) -> Path:
    """The path, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
