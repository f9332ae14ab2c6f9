"""A stand-in for the smoke runner: numbers that agree, with faults put in. Needs only the standard library.

Zipped as it is, it runs inside an image that has no torch; its environment then says what it saw there.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path

# A port of the machine outside on which somebody listens.
PORT = 0


def results_of(plan_bytes: bytes, findings=(), scale=None, environment=None) -> list[dict]:
    """The lines of results.jsonl for a plan; ``scale`` multiplies the numbers of the cases it names."""
    plan, digest = json.loads(plan_bytes), hashlib.sha256(plan_bytes).hexdigest()
    run = {
        "schema": "envbuild.results/1", "type": "run", "plan_digest": f"sha256:{digest}",
        "nonce": plan["nonce"], "smoke_version": "1", "environment": environment or {"python": "3.11.2"},
        "environment_findings": list(findings), "started_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    lines = [run]
    for case in plan["cases"]:
        factor = (scale or {}).get(case["id"], 1.0)
        numbers = [(number, factor * (6.5 - number / 8)) for number in range(1, case["training"]["steps"] + 1)]
        steps = [{"step": number, "loss": loss, "grad_norm": 1.5, "seconds": 0.1} for number, loss in numbers]
        lines.append(
            {"type": "case", "case": case["id"], "status": "completed", "steps": steps, "seconds": 1.0, "failure": None}
        )
    return [*lines, {"type": "end", "finished_at": "2026-01-01T00:01:00Z"}]


def write(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    plan, out = (Path(sys.argv[sys.argv.index(option) + 1]) for option in ("--plan", "--out"))
    with socket.socket() as outside:
        seen = {"interfaces": [name for _, name in socket.if_nameindex()]}
        seen["reached"] = outside.connect_ex(("127.0.0.1", PORT)) == 0
    write(out / "results.jsonl", results_of(plan.read_bytes(), environment=seen))


if __name__ == "__main__":
    main()
