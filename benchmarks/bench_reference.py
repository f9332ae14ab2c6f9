"""What the reference adds to a certification: processor time of the runner with it and without, in one run.

Both run the same plan (certify-quick for the CPU, or --matrix) from the same zipapp, in turn. Without --python, the
environment is installed from the lock first.

Exits 1 when the reference adds more than 20% (medians), or a case did not complete.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from cpu_matrix import options_of, prepared

LIMIT = 0.2


def processor_seconds(command: list[str | Path]) -> float:
    """Run a command; return user and system seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"with": [], "without": []}
    with prepared(options.python, options.matrix) as bench:
        given = bench.run.index("--plan") + 1
        plan = json.loads(Path(bench.run[given]).read_text(encoding="utf-8"))
        for case in plan["cases"]:
            case["compare_reference"] = False
        bare = bench.work / "without.json"
        bare.write_text(json.dumps(plan), encoding="utf-8")
        commands = {"with": bench.run, "without": [*bench.run[:given], bare, *bench.run[given + 1 :]]}
        for repeat in range(options.repeats):
            for name, seconds in taken.items():
                seconds.append(processor_seconds([*commands[name], bench.work / f"{name}-{repeat}"]))
    print(f"{options.matrix} on the CPU: {bench.count} cases, {options.repeats} runs each, in turn")
    for name, seconds in taken.items():
        print(f"{name:8} {statistics.median(seconds):6.1f} s ({', '.join(f'{value:.1f}' for value in seconds)})")
    added = statistics.median(taken["with"]) / statistics.median(taken["without"]) - 1
    print(f"added    {added:6.1%}  (at most {LIMIT:.0%})")
    return int(added > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
