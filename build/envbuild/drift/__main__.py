"""Compares wheels in a process of its own: ``python -m envbuild.drift RESULT``, with what to compare on stdin.

Reading makes millions of objects. Here no collector looks at them, none is freed before the process ends, and whoever
waits for the answer goes on with its own work.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envbuild.core.errors import CheckRefusedError
from envbuild.drift.check import find_drift
from envbuild.drift.reach import Outlines, Reach, StackPart
from envbuild.drift.sources import SourceTree


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """The findings of each of ``pairs`` (two names), in their order.

    ``wheels`` has the path of each name's wheel, the rest is as in :class:`envbuild.drift.worker.Comparison`.
    """
    try:
        trees = {name: SourceTree.from_wheel(Path(path)) for name, path in request["wheels"].items()}
    except CheckRefusedError as error:
        return {"refused": {"what": error.what, "why": error.why, "fix": error.fix}}
    modules, users, outlines = request["modules"], request["users"], Outlines()

    def part(name: str) -> StackPart:
        return StackPart(trees[name], tuple(modules.get(name, ())), is_used=bool(users.get(name)))

    reaches = {name: Reach([part(name), *map(part, users.get(name, ()))], outlines) for name, _ in request["pairs"]}
    by_pair = [
        find_drift(trees[name], trees[used], reaches[name], request["unused"].get(name, ()))
        for name, used in request["pairs"]
    ]
    return {"findings": [[asdict(finding) for finding in findings] for findings in by_pair]}


if __name__ == "__main__":
    gc.disable()
    Path(sys.argv[1]).write_text(json.dumps(compare(json.load(sys.stdin))))
    # Past the interpreter's shutdown, which would free every object one by one.
    os._exit(0)
