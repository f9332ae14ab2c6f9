"""A run of the CPU matrix that is killed in the middle and goes on, against one that is left alone.

The runner is killed (SIGKILL) when half of the cases have ended, and started again with ``--resume``. What had ended
must stand as it was, line by line, and only the rest may be trained. Without --python, the environment is installed
first.

Exits 1 when a case that had ended was trained again or a case is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cpu_matrix import options_of, prepared


def cases_in(out: Path) -> dict[str, str]:
    """Return the lines of the cases that ended, by ID."""
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [(json.loads(line), line) for line in lines if line.endswith("\n")]
    return {record["case"]: line for record, line in whole if record["type"] == "case"}


def run(command: list[str | Path], kill_after: int | None = None) -> tuple[float, int]:
    """Run to the end, or kill after so many cases; return seconds and how many cases started."""
    began, started, ended = time.perf_counter(), 0, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line) if line.startswith("{") else {}
            started += event.get("event") == "case-started"
            ended += event.get("event") == "case-finished"
            if ended == kill_after:
                os.kill(process.pid, signal.SIGKILL)
                break
    if kill_after is None and process.returncode != 0:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return time.perf_counter() - began, started


def main() -> int:
    options = options_of(__doc__).parse_args()
    with prepared(options.python, options.matrix) as bench:
        command, work, count = bench.run, bench.work, bench.count
        whole, _ = run([*command, work / "whole"])
        before, _ = run([*command, work / "killed"], kill_after=count // 2)
        ended = cases_in(work / "killed")
        after, started = run([*command, work / "killed", "--resume"])
        cases = cases_in(work / "killed")
    again = [case for case, line in ended.items() if cases.get(case) != line]
    print(f"{options.matrix} on the CPU: {count} cases")
    print(f"left alone           {whole:6.1f} s")
    print(f"killed, with {len(ended):3} ended {before:6.1f} s")
    print(f"resumed, {started:3} started  {after:6.1f} s")
    print(f"both / left alone    {(before + after) / whole:6.2f}")
    print(f"trained again        {len(again)}  (0)")
    return int(bool(again) or len(cases) != count or started != count - len(ended))


if __name__ == "__main__":
    sys.exit(main())
