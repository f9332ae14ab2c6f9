"""The CPU matrix with rank processes that stay alive, against new interpreters for every case, in one run.

Both run the same plan (certify-quick for the CPU, or --matrix) from the same zipapp in the same environment, one after
the other, several times in turn; what is compared is the time of the whole command, imports and checks included.
Without --python, the environment is installed from the lock first.

Exits 1 when the ratio of the medians is below 3, or a case did not complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu_matrix import environment, write_plan

from envbuild.certify.zipapp import smoke_bytes

LIMIT = 3.0


def timed(python: Path, smoke: Path, plan: Path, out: Path, isolation: str) -> tuple[float, int]:
    """Run the plan; return seconds, and how many rank processes were started."""
    command = [python, "-I", smoke, "run", "--plan", plan, "--out", out, "--isolation", isolation]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    return seconds, sum(line["fresh_processes"] for line in lines if line["type"] == "case")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of an environment with the stack mcore for the CPU")
    parser.add_argument("--matrix", default="certify-quick")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"live": [], "process": []}
    started: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-") as name:
        work = Path(name)
        python = options.python or environment(work)
        smoke, plan = work / "smoke.pyz", work / "plan.json"
        smoke.write_bytes(smoke_bytes())
        count = write_plan(plan, options.matrix)
        for repeat in range(options.repeats):
            for isolation, seconds in taken.items():
                took, started[isolation] = timed(python, smoke, plan, work / f"{isolation}-{repeat}", isolation)
                seconds.append(took)
    print(f"{options.matrix} on the CPU: {count} cases, {options.repeats} runs each, in turn")
    for isolation, seconds in taken.items():
        shown = ", ".join(f"{value:.1f}" for value in seconds)
        median = statistics.median(seconds)
        print(f"{isolation:8} {median:7.1f} s ({shown}), {started[isolation]} rank processes")
    ratio = statistics.median(taken["process"]) / statistics.median(taken["live"])
    print(f"ratio    {ratio:7.2f}  (at least {LIMIT:g})")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
