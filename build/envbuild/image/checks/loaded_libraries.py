"""The shared libraries that a process loads when it imports torch: read from one, inside the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import describe_status, tail
from envbuild.sync.conclusive import run_conclusively
from envbuild.sync.install_target import RunCommand

PROBE = "containers/native/loaded_libraries.py"
MARK = "envbuild-loaded: "


def loaded_libraries(python: str, run: RunCommand, logs: Path, probe: str) -> tuple[str, ...] | None:
    """The shared libraries of a process that imported torch; None where there is no torch.

    Args:
        probe: the program :data:`PROBE`, as ``run`` sees it.

    Raises:
        CheckRefusedError: torch does not import.
        InconclusiveError: its import did not end in time.
    """
    log = logs / "loaded.log"
    finished = run_conclusively(run, [python, "-I", probe, MARK], what="import torch", log=log)
    # By the mark: torch, and what it imports, may print before.
    for line in reversed(finished.output.splitlines()):
        if line.startswith(MARK):
            paths: Any = json.loads(line.removeprefix(MARK))
            return None if paths is None else tuple(sorted(str(path) for path in paths))
    raise CheckRefusedError(
        f"cannot read which libraries torch loads: its process {describe_status(finished.status)}",
        why=tail(finished.output),
        fix="See the log. If torch does not import, lock other versions.",
        log=log,
    )
