"""Healthy runs of certify-full on the CPU, with SSE4.1 by setting and as the CPU gives, in turn: no alarm is raised.

Exits 1 after an alarm. The record is written anew after each run. Without --venv, the lock is installed first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_matrix import ROOT, environment

# oneDNN's name of an instruction set, and torch's.
SETTINGS: dict[str, dict[str, str]] = {
    "sse4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "as the CPU gives": {},
}
# As the runs begin: they take an hour.
COMMIT = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.strip()
# What a reader wants to see next to its band.
MIXED = "-bf16-"


def certified(python: Path, matrix: str, variables: dict[str, str], out: Path) -> dict[str, Any]:
    """Certify once; return the row of the record."""
    command = [sys.executable, "-m", "envbuild", "certify", "--stack", "mcore", "--target", "cpu", "--matrix", matrix]
    command += ["--in", "venv", "--venv", str(python.parent.parent), "--fresh", "--key", "off", "--json"]
    command += ["--out-dir", str(out)]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    document = json.loads(done.stdout)
    failure = document.get("error") or {}
    cases = document.get("cases") or failure.get("cases", [])
    problems = [*failure.get("problems", []), *(problem for case in cases for problem in case["problems"])]
    if done.returncode and not problems:
        raise SystemExit(done.stderr)
    return {
        "variables": variables,
        "seconds": round(seconds),
        "cases": len(cases),
        "alarms": [f"{problem['check']}: {problem['text']}" for problem in problems],
        "bf16": {case["id"]: _numbers(case) for case in cases if MIXED in case["id"]},
    }


def _numbers(case: dict[str, Any]) -> dict[str, Any]:
    compared = case["reference"] or case
    return {name: compared[name] for name in ("largest_relative_difference", "tolerance")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--matrix", default="certify-full")
    parser.add_argument("--runs", type=int, default=5, help="with each setting")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["sse4.1", "as the CPU gives"])
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="envbuild-healthy-") as work:
        python = options.venv / "bin" / "python" if options.venv else environment(Path(work))
        for number in range(options.runs):
            for setting in options.settings:
                row = certified(python, options.matrix, SETTINGS[setting], Path(work) / "out")
                rows.append({"setting": setting, "run": number + 1, **row})
                print(f"{setting}, run {number + 1}: {row['cases']} cases, {row['seconds']} s, alarms: {row['alarms']}")
                sys.stdout.flush()
                if options.record:
                    _write(options.record, options.matrix, rows)
    return int(any(row["alarms"] for row in rows))


def _write(path: Path, matrix: str, rows: list[dict[str, Any]]) -> None:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    record = {
        "what": f"Healthy runs of {matrix} on the CPU, with instruction sets by setting: alarms, and the numbers of "
        "bf16 next to their bands.",
        "command": "python benchmarks/healthy_cpu.py --record RECORD",
        "commit": COMMIT,
        "machine": {"cpu": cpu.partition(":")[2].strip(), "cores": os.cpu_count()},
        "runs": rows,
    }
    staged = path.with_suffix(".part")
    staged.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    staged.rename(path)


if __name__ == "__main__":
    sys.exit(main())
