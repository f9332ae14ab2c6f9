"""Small uv projects with workspaces, as upstreams have them: locked by the real uv, and what it installs of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.build_backend import BACKEND, pyproject

from envbuild.lock.uv.program import uv_program


class UvProject:
    """A project in a git repository.

    Attributes:
        env: of uv and git.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = folder, {**os.environ, **env}
        folder.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.write({".gitignore": "__pycache__\n"})

    def package(self, place: str, name: str, version: str, more: str = "", *, needs: tuple[str, ...] = ()) -> None:
        """A package that its own backend builds: one module of its name."""
        head = pyproject(name, version) + f'requires-python = ">=3.11"\ndependencies = {json.dumps(needs)}\n'
        module = name.replace("-", "_")
        self.write({f"{place}/pyproject.toml": head + more, f"{place}/backend.py": BACKEND})
        self.write({f"{place}/{module}/__init__.py": f"version = {version!r}\n"})

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *who, *words], cwd=self.folder, env=self.env, capture_output=True, check=True)
        return done.stdout.decode().strip()

    def commit(self) -> str:
        """Commit everything; the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")
        return self.git("rev-parse", "HEAD")

    def uv(self, *words: str) -> str:
        done = subprocess.run(
            [uv_program(), *words], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def locked(self) -> str:
        """Lock it and commit it; the commit."""
        self.uv("lock")
        return self.commit()


def dist_infos(venv: Path) -> dict[str, str]:
    """The installed packages by name, with their versions."""
    listed: list[dict[str, Any]] = json.loads(
        subprocess.run(
            [uv_program(), "pip", "list", "--format", "json", "--python", venv / "bin/python"],
            capture_output=True,
            check=True,
        ).stdout
    )
    return {package["name"]: package["version"] for package in listed}
