"""What `envbuild lock --nemo main` costs at the tip of its branch, and again after a commit of the README, unverified.

Cold: empty caches. Warm: no lock is there, all caches are. README: the branch has one more commit, which changes
README.md alone. Each is next to a bare `uv lock` of the project that came of it, in the same run and with caches of its
own in the same state: without pins where they are to be found out, with them after the commit. Processor seconds are of
all processes: a busy machine changes them less than the time.

    python benchmarks/bench_relock.py --work DIR --repository https://github.com/NVIDIA-NeMo/NeMo=PATH \\
        --repository https://github.com/NVIDIA/Megatron-LM=PATH \\
        --repository https://github.com/NVIDIA/TransformerEngine=PATH \\
        --record benchmarks/records/relock.json

--repository takes a local copy (bare, with main) in the place of an address; NeMo's is copied, and gets the commits.
Without repositories, the committed record is held to the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomlkit
from bench_history import git_config, own_commit, repositories_of
from bench_lock import Run, timed

from envbuild.lock.uv.interpreter import pyenv_python
from envbuild.lock.uv.program import uv_program

RECORD = Path(__file__).resolve().parent / "records" / "relock.json"
NEMO = "https://github.com/NVIDIA-NeMo/NeMo"
ENVBUILD = [sys.executable, "-m", "envbuild", "lock", "--nemo", "main", "--name", "tip", "--no-verify"]
MOST_SECONDS = {"warm": 60.0, "README": 30.0}


class Bench:
    """Runs envbuild and uv, each with caches of its own, below one folder."""

    def __init__(self, work: Path, repositories: dict[str, Path]) -> None:
        self.work = work
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.nemo = work / "NeMo.git"
        self.git("clone", "--quiet", "--bare", "--shared", "--branch", "main", str(repositories[NEMO]), str(self.nemo))
        config = work / "gitconfig"
        config.write_text(git_config({**repositories, NEMO: self.nemo}))
        # pyenv's shims are in uv's way; packages in a folder of find-links have no date.
        path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part).name != "shims")
        self.env = {**os.environ, "PATH": path, "GIT_CONFIG_GLOBAL": str(config), "GIT_LFS_SKIP_SMUDGE": "1"}
        self.env |= {"UV_NO_GITHUB_FAST_PATH": "1"}
        self.env.pop("UV_FIND_LINKS", None)

    def git(self, *words: str, **env: str) -> str:
        done = subprocess.run(["git", *words], env={**os.environ, **env}, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def envbuild(self, project: str) -> Run:
        folder = self.work / project
        folder.mkdir(exist_ok=True)
        env = {**self.env, "ENVBUILD_CACHE_DIR": str(self.work / "store"), "UV_CACHE_DIR": str(self.work / "uv-ours")}
        return timed(ENVBUILD, folder, env, (0,))

    def bare(self, project: str, *, pinned: bool) -> Run:
        """`uv lock` on a copy of the project that came of it."""
        (lock,) = (self.work / project / "lockfiles" / "tip").iterdir()
        folder = self.work / "bare"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        document = tomlkit.parse((lock / "pyproject.toml").read_text())
        if not pinned:
            del document["tool"]["uv"]["constraint-dependencies"]
        (folder / "pyproject.toml").write_text(tomlkit.dumps(document))
        python = pyenv_python(document["project"]["requires-python"].removeprefix("==").removesuffix(".*"))
        env = {**self.env, "UV_CACHE_DIR": str(self.work / "uv-bare"), **({"UV_PYTHON": str(python)} if python else {})}
        return timed([str(uv_program()), "lock", "--preview-features", "minimum-libc-version"], folder, env, (0,))

    def commit_readme(self, number: int) -> None:
        """One more commit on main that changes README.md alone."""
        own = {"GIT_DIR": str(self.nemo), "GIT_INDEX_FILE": str(self.work / "index")}
        people = {f"GIT_{who}_{what}": "bench" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        text = self.work / "README.md"
        text.write_text(f"{number}\n")
        self.git("read-tree", "main", **own)
        blob = self.git("hash-object", "-w", str(text), **own)
        self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},README.md", **own)
        tree = self.git("write-tree", "--missing-ok", **own)
        commit = self.git("commit-tree", tree, "-p", "main", "-m", "README", **own, **people)
        self.git("update-ref", "refs/heads/main", commit, **own)


def measured(bench: Bench, repeats: int) -> dict[str, list[tuple[Run, Run]]]:
    """(envbuild, uv) of each run."""
    pairs: dict[str, list[tuple[Run, Run]]] = {}
    ours = bench.envbuild("cold")
    pairs["cold"] = [(ours, bench.bare("cold", pinned=False))]
    print(f"cold: {ours.seconds:.1f} s", flush=True)
    pairs["warm"] = [(bench.envbuild(f"warm-{n}"), bench.bare(f"warm-{n}", pinned=False)) for n in range(repeats)]
    pairs["README"] = []
    for number in range(repeats):
        bench.commit_readme(number)
        pairs["README"].append((bench.envbuild("cold"), bench.bare("cold", pinned=True)))
    return pairs


def numbers(runs: dict[str, list[tuple[Run, Run]]]) -> dict[str, Any]:
    def summary(values: list[Run]) -> dict[str, list[float]]:
        return {
            "seconds": [round(run.seconds, 1) for run in values],
            "processor_seconds": [round(run.cpu_seconds, 1) for run in values],
        }

    return {
        kind: {"envbuild": summary([ours for ours, _ in pairs]), "uv": summary([peer for _, peer in pairs])}
        for kind, pairs in runs.items()
    }


def hold(record: dict[str, Any]) -> bool:
    """Print the numbers, and whether they are met."""
    met = True
    for kind, values in record["runs"].items():
        ours, peer = (statistics.median(values[who]["seconds"]) for who in ("envbuild", "uv"))
        most = MOST_SECONDS.get(kind)
        print(f"{kind}: {ours:.1f} s, bare uv lock {peer:.1f} s" + (f" (at most {most:g} s)" if most else ""))
        print(f"  processor seconds {values['envbuild']['processor_seconds']}, uv {values['uv']['processor_seconds']}")
        met = met and (most is None or ours <= most)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--repository", action="append", default=[], metavar="ADDRESS=PATH")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if not options.repository:
        return int(not hold(json.loads(RECORD.read_text())))
    bench = Bench(options.work.resolve(), repositories_of(options.repository))
    tip = bench.git("rev-parse", "main", GIT_DIR=str(bench.nemo))
    record = {
        "what": "envbuild lock --nemo main --no-verify at the tip of NeMo's main, and after a commit of the README; "
        "bare uv lock of the same project",
        "envbuild": own_commit(),
        "nemo": tip,
        "load": [round(value, 1) for value in os.getloadavg()],
        "runs": numbers(measured(bench, options.repeats)),
    }
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return int(not hold(record))


if __name__ == "__main__":
    sys.exit(main())
