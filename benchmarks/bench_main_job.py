"""How long the main job takes: from nothing, with warm caches and no outputs, and with nothing changed.

"From nothing" has an empty store and an empty uv cache, and is what `./dev demo` does after setting up .venv.
Beside it stands a plain `uv venv` and `uv pip install` of the same lock, from an empty uv cache, in the same run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STACK = ["--stack", "mcore", "--target", "cpu"]
COMMANDS = {
    "lock": ["lock", *STACK],
    "image": ["image", *STACK, "--format", "oci,sqsh"],
    "certify": ["certify", *STACK],
}
COLD_LIMIT_SECONDS = 480.0
WARM_LIMIT_SECONDS = 180.0
NO_OP_LIMIT_SECONDS = 2.0
# The quick matrix inside the image, on two cores.
CERTIFY_LIMIT_SECONDS = 120.0


def timed(command: list[str], cwd: Path, env: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main_job(project: Path, env: dict[str, str]) -> dict[str, float]:
    return {
        name: timed([sys.executable, "-m", "envbuild", *arguments], project, env)
        for name, arguments in COMMANDS.items()
    }


def plain_uv(project: Path, work: Path, env: dict[str, str]) -> float:
    """Seconds of a plain installation of the lock's main phase, from an empty uv cache."""
    (main,) = (project / "lockfiles" / "mcore").glob("*/main.txt")
    env = {**env, "UV_CACHE_DIR": str(work / "uv-plain"), "VIRTUAL_ENV": str(work / "venv")}
    env.setdefault("UV_FIND_LINKS", env.get("PIP_FIND_LINKS", "").replace(" ", ","))
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"
    version = next(
        line.split('"')[1]
        for line in (main.parent / "stack.lock.toml").read_text().splitlines()
        if line.startswith("python = ")
    )
    seconds = timed([uv, "venv", "--python", version, str(work / "venv")], project, env)
    return seconds + timed([uv, "pip", "install", "--no-deps", "--require-hashes", "-r", str(main)], project, env)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-") as name:
        work = Path(name)
        project = work / "project"
        project.mkdir()
        env = {**os.environ, "ENVBUILD_CACHE_DIR": str(work / "store"), "UV_CACHE_DIR": str(work / "uv")}
        cold = main_job(project, env)
        shutil.rmtree(project / "out")
        shutil.rmtree(project / "lockfiles")
        warm = main_job(project, env)
        again = main_job(project, env)
        plain = plain_uv(project, work, env)
    print(f"{'':22}{'lock':>8}{'image':>8}{'certify':>9}{'all':>8}   seconds")
    for title, times in (("from nothing", cold), ("warm, outputs deleted", warm), ("nothing changed", again)):
        row = f"{times['lock']:8.1f}{times['image']:8.1f}{times['certify']:9.1f}{sum(times.values()):8.1f}"
        print(f"{title:22}{row}")
    print(f"plain uv installation of the same lock, cold: {plain:.1f} s")
    print(f"image from nothing / plain uv installation:   {cold['image'] / plain:.2f}")
    limits = [
        ("from nothing", sum(cold.values()), COLD_LIMIT_SECONDS),
        ("certify, from nothing", cold["certify"], CERTIFY_LIMIT_SECONDS),
        ("warm, outputs deleted", sum(warm.values()), WARM_LIMIT_SECONDS),
        *((f"{name}, nothing changed", seconds, NO_OP_LIMIT_SECONDS) for name, seconds in again.items()),
    ]
    missed = [row for row in limits if row[1] > row[2]]
    for title, seconds, limit in missed:
        print(f"MISSED: {title} took {seconds:.1f} s, at most {limit:g}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
