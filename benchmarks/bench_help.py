"""What starting the tool costs: `envbuild --help` against `python -c pass`, medians of one interleaved run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 30
LIMIT = 8.0


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> int:
    peer = [sys.executable, "-c", "pass"]
    tool = [sys.executable, "-m", "envbuild", "--help"]
    pairs = [(seconds(peer), seconds(tool)) for _ in range(REPEATS)]
    base = statistics.median(pair[0] for pair in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    ratio = ours / base
    print(f"python -c pass   {base * 1000:6.1f} ms")
    print(f"envbuild --help  {ours * 1000:6.1f} ms")
    print(f"ratio            {ratio:6.2f}  (at most {LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
