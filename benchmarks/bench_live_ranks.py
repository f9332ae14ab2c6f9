"""The CPU matrix with rank processes that stay alive, against new interpreters for every case, in one run.

Both run the same plan (certify-quick for the CPU, or --matrix) from the same zipapp in the same environment, one after
the other, several times in turn; what is compared is the time of the whole command, imports and checks included.
Without --python, the environment is installed from the lock first.

Exits 1 when the ratio of the medians is below 3, or a case did not complete.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cpu_matrix import Bench, options_of, prepared

LIMIT = 3.0


def timed(bench: Bench, out: Path, isolation: str) -> tuple[float, int]:
    """Run the plan; return seconds, and how many rank processes were started."""
    command = [*bench.run, out, "--isolation", isolation]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    return seconds, sum(line["fresh_processes"] for line in lines if line["type"] == "case")


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"live": [], "process": []}
    started: dict[str, int] = {}
    with prepared(options.python, options.matrix) as bench:
        for repeat in range(options.repeats):
            for isolation, seconds in taken.items():
                took, started[isolation] = timed(bench, bench.work / f"{isolation}-{repeat}", isolation)
                seconds.append(took)
    print(f"{options.matrix} on the CPU: {bench.count} cases, {options.repeats} runs each, in turn")
    for isolation, seconds in taken.items():
        shown = ", ".join(f"{value:.1f}" for value in seconds)
        median = statistics.median(seconds)
        print(f"{isolation:8} {median:7.1f} s ({shown}), {started[isolation]} rank processes")
    ratio = statistics.median(taken["process"]) / statistics.median(taken["live"])
    print(f"ratio    {ratio:7.2f}  (at least {LIMIT:g})")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
