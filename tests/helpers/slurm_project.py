"""A project whose cases run on the virtual cluster: its cluster's file, and a runner that waits for the test."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import tomlkit

from envbuild.core.digests import sha256_file

NAME = "virtual"
FAKE_RUNNER = Path(__file__).with_name("fake_runner.py")
# The fake runner as node 0 of a job. It writes the results of one more case each time that the test lets it go on, and
# goes on with what is there, as the real one does. The other nodes wait for it.
STEPPING = """\
import json, os, signal, sys, time
from pathlib import Path
import fake_runner as fake

words = sys.argv
value = lambda option: words[words.index(option) + 1]
out, rank = Path(value("--out")), int(value("--node-rank"))
results, steps = out / "results.jsonl", out.parent / "steps"

def end(status):
    print(json.dumps({"event": "exit", "node": rank, "status": status}), flush=True)
    sys.exit(status)

def wait(condition):
    while not condition():
        time.sleep(0.02)

signal.signal(signal.SIGTERM, lambda *_: end(130))
for name in ("STATUS",):
    if (out.parent / name).exists():
        message, status = json.loads((out.parent / name).read_text())
        print(message, flush=True)
        end(status if rank == 0 else 6)
if rank:
    wait(lambda: '"type": "end"' in (results.read_text() if results.exists() else ""))
    end(0)
print("node 0 on", os.environ.get("SLURMD_NODENAME", "?"), flush=True)
plan = Path(value("--plan")).read_bytes()
own = fake.sha256(Path(words[0]))
lines = fake.results_of(plan, image=fake.sha256(Path(value("--image"))), smoke_digest=own)
written = len(results.read_text().splitlines()) if results.exists() else 0
for number, line in enumerate(lines):
    if number < written:
        continue
    wait(lambda: not steps.exists() or number < int(steps.read_text() or 0))
    with results.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    if line["type"] == "case":
        event = {"event": "case-finished", "case": line["case"], "status": line["status"], "seconds": 1.5}
        print(json.dumps(event), flush=True)
end(0)
"""


def write_cluster(project: Path, folder: Path, *, name: str = NAME, **slurm: Any) -> None:
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
    }
    file.write_text(tomlkit.dumps(document))


def stepping_runner(folder: Path) -> tuple[Path, str]:
    """The runner as a zipapp, and its digest."""
    file = folder / "smoke.pyz"
    sha256 = "\n\ndef sha256(path):\n    return 'sha256:' + hashlib.sha256(path.read_bytes()).hexdigest()\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "fake_runner.py", FAKE_RUNNER.read_text().replace("\n\nif __name__", f"{sha256}\n\nif __name__")
        )
        archive.writestr("__main__.py", STEPPING)
    return file, sha256_file(file)


def let_go(run_folder: Path, steps: int) -> None:
    """Let the runner write so many lines."""
    partial = run_folder / "steps.partial"
    partial.write_text(str(steps))
    partial.replace(run_folder / "steps")


def record_of(out: Path) -> dict[str, str]:
    """The record of the only job below an output folder."""
    (file,) = out.glob("certificates/*/*/run/job.json")
    record: dict[str, str] = json.loads(file.read_text())
    return record
