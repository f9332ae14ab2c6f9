"""A project whose cases run on the virtual cluster: its cluster's file, and a runner that waits for the test."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import tomlkit

from envbuild.catalog.data import data_root
from envbuild.core.digests import sha256_file

NAME = "virtual"
FAKE_RUNNER = Path(__file__).with_name("fake_runner.py")
AGREEING_RANKS = Path(__file__).with_name("agreeing_ranks.py")
# The fake runner as node 0 of a job: it goes on with what is there, as the real one does, and waits behind its first
# case while there is a file `hold` in the cluster's folder; `sweeps` there has what it measured instead of a good
# network. The other nodes wait for it.
STEPPING = """\
import json, os, signal, sys, time
from pathlib import Path
import fake_runner as fake

FOLDER = Path("{folder}")
words = sys.argv
value = lambda option: words[words.index(option) + 1]
out, rank = Path(value("--out")), int(value("--node-rank"))
results, hold, ends = out / "results.jsonl", FOLDER / "hold", FOLDER / "ends"
last, sweeps = FOLDER / "last-status", FOLDER / "sweeps"

def end(status):
    print(json.dumps({"event": "exit", "node": rank, "status": status}), flush=True)
    sys.exit(status)

def wait(condition):
    while not condition():
        time.sleep(0.02)

signal.signal(signal.SIGTERM, lambda *_: end(130))
if ends.exists():
    message, status = json.loads(ends.read_text())
    print(message if rank == 0 else "node 0 is gone", flush=True)
    end(status if rank == 0 else 6)
if rank:
    wait(lambda: '"type": "end"' in (results.read_text() if results.exists() else ""))
    end(0)
print("node 0 on", os.environ.get("SLURMD_NODENAME", "?"), flush=True)
plan = Path(value("--plan")).read_bytes()
own = fake.sha256(Path(words[0]))
sweep = json.loads(sweeps.read_text()) if sweeps.exists() else None
lines = fake.results_of(plan, sweep=sweep, image=fake.sha256(Path(value("--image"))), smoke_digest=own)
written = len(results.read_text().splitlines()) if results.exists() else 0
for number, line in enumerate(lines):
    if number < written:
        continue
    wait(lambda: number < 2 or not hold.exists())
    with results.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    if line["type"] == "case":
        event = {"event": "case-finished", "case": line["case"], "status": line["status"], "seconds": 1.5}
        print(json.dumps(event), flush=True)
end(int(last.read_text()) if last.exists() else 0)
"""

# The real runner with other ranks.
RANKED = """\
from dataclasses import replace
from envbuild_smoke import cli, runner
from envbuild_smoke.ranks.program import RankProgram

real, program = runner.run_plan, RankProgram(tasks="envbuild_smoke.agreeing_ranks")

def run_plan(*arguments, options, **more):
    return real(*arguments, options=replace(options, program=program), **more)

if __name__ == "__main__":
    runner.run_plan = run_plan
    cli.run_and_exit()
"""


def write_cluster(
    project: Path, folder: Path, *, name: str = NAME, image: dict[str, str] | None = None, **slurm: Any
) -> None:
    """Define a cluster of the virtual nodes; ``folder`` is its shared storage, ``slurm`` changes its [slurm]."""
    file = project / "envs/clusters" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "time_limit_minutes": 30,
        "gpus_per_node": 0,
        "exclusive": True,
        "runtime": "bwrap",
        "python": sys.executable,
        "query_seconds": 1,
    }
    document = {
        "summary": "virtual nodes of one machine",
        "launcher": "slurm",
        "folder": str(folder),
        "slurm": table | slurm,
        "mounts": {"data": {"source": str(folder)}},
        **({"image": image} if image else {}),
    }
    file.write_text(tomlkit.dumps(document))


def stepping_runner(folder: Path, storage: Path) -> tuple[Path, str]:
    """The runner as a zipapp, and its digest; ``storage`` is the cluster's folder."""
    file = folder / "smoke.pyz"
    sha256 = "\n\ndef sha256(path):\n    return 'sha256:' + hashlib.sha256(path.read_bytes()).hexdigest()\n"
    source = FAKE_RUNNER.read_text().replace("\n\nif __name__", f"{sha256}\n\nif __name__")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("fake_runner.py", source)
        archive.writestr("__main__.py", STEPPING.replace("{folder}", str(storage)))
    return file, sha256_file(file)


def ranked_runner(folder: Path) -> tuple[Path, str]:
    """The real runner as a zipapp, with ranks that need no torch, and its digest."""
    file = folder / "smoke.pyz"
    smoke = data_root() / "smoke"
    with zipfile.ZipFile(file, "w") as archive:
        for module in (smoke / "envbuild_smoke").rglob("*.py"):
            archive.write(module, str(module.relative_to(smoke)))
        for module in (FAKE_RUNNER, AGREEING_RANKS):
            archive.write(module, f"envbuild_smoke/{module.name}")
        archive.writestr("__main__.py", RANKED)
    return file, sha256_file(file)


def record_of(out: Path) -> dict[str, str]:
    """The record of the only job below an output folder."""
    (file,) = out.glob("certificates/*/*/run/job.json")
    record: dict[str, str] = json.loads(file.read_text())
    return record
