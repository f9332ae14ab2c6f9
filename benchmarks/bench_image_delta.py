"""What one commit of one component costs in an image of about 3 GB: new bytes, and the time to build it again.

A project of its own is made in a scratch folder: a stack with torch's CPU build, as many NVIDIA libraries as make it
3 GB, and a component from a local git repository, which then moves by one commit. The peer is the same change where
everything lies in one layer, as one `RUN uv sync` makes it: a new environment, installed from a warm cache, and the
layer of it (tar and gzip, level 6, as a push compresses it).

Exits 1 when more than 1% of the image's bytes are new, the rebuild takes more than 30 s, or finding that there is
nothing to do more than 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.catalog.site import load_site
from envbuild.lock.lockfile import read_lock
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.torch_builds import locked_torch

SHARE_LIMIT = 0.01
REBUILD_LIMIT_SECONDS = 30.0
NOTHING_LIMIT_SECONDS = 2.0
STACK = "delta"
# The libraries are there for their size.
ALLOW = ("--allow", "cuda-mixed")
# Releases, so that two runs are about the same bytes.
NEEDS = (
    "triton==3.3.0",
    "nvidia-cublas==13.1.1.3",
    "nvidia-cufft==12.0.0.61",
    "nvidia-cusolver==12.0.4.66",
    "nvidia-nccl-cu13==2.29.7",
    "nvidia-cusparselt-cu13==0.8.0",
)
STACK_FILE = """\
summary = "3 GB and a component that moves"
driver = "mcore"
matrix = "certify-quick"
anchor = "moving"

[[builds]]
target = "cpu"
bases = ["debian12", "ubuntu2204", "ubuntu2404"]
default_base = "host"

[components.moving]
git = "{repository}"
ref = "main"
modules = ["moving"]

[components.torch]
version = "==2.13.0"
modules = ["torch"]

[requirements.setuptools]
version = "<82"
reason = "builds the component"
"""
PROJECT_FILE = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "moving"
version = "1.0"
dependencies = {needs}

[tool.setuptools]
packages = ["moving"]
"""


@dataclass(frozen=True)
class Bench:
    """The scratch project, and how envbuild is run in it."""

    work: Path
    cache: Path

    @property
    def project(self) -> Path:
        return self.work / "project"

    @property
    def repository(self) -> Path:
        return self.work / "moving"

    def environment(self) -> dict[str, str]:
        settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}
        return {**os.environ, **settings, "ENVBUILD_CACHE_DIR": str(self.cache), "NO_COLOR": "1"}

    def envbuild(self, *arguments: str) -> tuple[dict[str, Any], float]:
        """What ``--json`` printed, and the seconds it took."""
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "envbuild", *arguments, "--stack", STACK, "--target", "cpu", "--json"],
            cwd=self.project,
            env=self.environment(),
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        value: dict[str, Any] = json.loads(done.stdout)
        return value, time.monotonic() - began

    def image(self) -> tuple[dict[str, Any], float]:
        value, seconds = self.envbuild("image", "--format", "oci")
        return value["record"], seconds

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
        subprocess.run(["git", "-C", self.repository, *identity, *arguments], check=True, stdout=subprocess.DEVNULL)

    def commit(self, number: int) -> None:
        """A commit that changes one line of the component."""
        module = self.repository / "moving/__init__.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"import torch\n\nNUMBER = {number}\nDEVICES = torch.cuda.device_count()\n")
        (self.repository / "pyproject.toml").write_text(PROJECT_FILE.format(needs=json.dumps(NEEDS)))
        self.git("add", "-A")
        self.git("commit", "-q", "-m", f"change {number}")


def prepare(bench: Bench) -> None:
    """The project and the component's repository."""
    stack = bench.project / "envs/stacks" / f"{STACK}.toml"
    stack.parent.mkdir(parents=True)
    stack.write_text(STACK_FILE.format(repository=bench.repository.as_uri()))
    bench.repository.mkdir()
    bench.git("init", "-q", "--initial-branch=main")
    bench.commit(1)


def one_layer(bench: Bench) -> dict[str, float]:
    """The peer: what one layer with everything weighs, and the seconds to make it again."""
    lock = next((bench.project / "lockfiles" / STACK).iterdir())
    venv = bench.work / "one-layer/venv"
    uv = [str(uv_program()), "--quiet"]
    places = locked_torch(load_site(), read_lock(lock).lock).uv_args()
    install = [*uv, "pip", "install", "--python", str(venv / "bin/python"), "--no-deps", "--link-mode", "copy", *places]
    environment = bench.environment()
    began = time.monotonic()
    subprocess.run([*uv, "venv", "--python", "3", str(venv)], check=True, env=environment)
    main = [*install, "--require-hashes", "--compile-bytecode", "-r", str(lock / "main.txt")]
    subprocess.run(main, check=True, env=environment)
    git = [*install, "--no-build-isolation", "-r", str(lock / "git.txt")]
    subprocess.run(git, check=True, env=environment)
    installed = time.monotonic() - began
    with (
        subprocess.Popen(["tar", "-C", str(venv.parent), "-cf", "-", "venv"], stdout=subprocess.PIPE) as tar,
        subprocess.Popen(["gzip", "-6"], stdin=tar.stdout, stdout=subprocess.PIPE) as packed,
    ):
        assert packed.stdout is not None
        size = sum(len(chunk) for chunk in iter(lambda: packed.stdout.read(1 << 20), b""))  # type: ignore[union-attr]
    return {"bytes": size, "install_seconds": installed, "seconds": time.monotonic() - began}


def measure(bench: Bench) -> dict[str, Any]:
    """Build, move the component by a commit, build again."""
    prepare(bench)
    bench.envbuild("lock", *ALLOW)
    first, cold = bench.image()
    bench.commit(2)
    bench.envbuild("lock", "--upgrade", *ALLOW)
    second, rebuild = bench.image()
    nothing = min(bench.image()[1] for _ in range(3))
    known = {layer["digest"] for layer in first["layers"]}
    size = sum(layer["size_bytes"] for layer in second["layers"])
    fresh = [layer for layer in second["layers"] if layer["digest"] not in known]
    return {
        "unpacked_bytes": sum(layer["unpacked_bytes"] for layer in second["layers"]),
        "bytes": size,
        "new_layers": [layer["name"] for layer in fresh],
        "new_bytes": sum(layer["size_bytes"] for layer in fresh),
        "new_share": sum(layer["size_bytes"] for layer in fresh) / size,
        "cold_seconds": cold,
        "rebuild_seconds": rebuild,
        "nothing_seconds": nothing,
        "cores": len(os.sched_getaffinity(0)),
    }


def missed(found: Mapping[str, Any]) -> list[str]:
    """The limits that were not kept, in words."""
    limits = {
        "new_share": SHARE_LIMIT,
        "rebuild_seconds": REBUILD_LIMIT_SECONDS,
        "nothing_seconds": NOTHING_LIMIT_SECONDS,
    }
    return [f"{name} is {found[name]:.4g}, at most {limit:g}" for name, limit in limits.items() if found[name] > limit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, help="a store to work in; its bases are used, and what is made stays")
    parser.add_argument("--no-peer", action="store_true", help="leave out the image with everything in one layer")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="envbuild-delta-", dir=arguments.cache) as work:
        bench = Bench(Path(work), (arguments.cache or Path(work) / "cache").absolute())
        found = measure(bench)
        print(json.dumps(found, indent=2), flush=True)
        if not arguments.no_peer:
            found["one_layer"] = one_layer(bench)
            print(json.dumps(found["one_layer"], indent=2), flush=True)
    text = json.dumps(found, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    problems = missed(found)
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
