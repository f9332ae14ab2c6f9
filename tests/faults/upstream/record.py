"""The record of the real bugs: which check found each in the release that has it, and that the fixed one passes."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from faults.environments import Environment
from faults.record import commit, machine, versions
from faults.upstream.bugs import BUGS, NOT_CAUGHT, Bug
from faults.upstream.releases import Verdict, described

from envbuild.core import locks
from envbuild.core.files import write_atomic

VARIABLE = "ENVBUILD_UPSTREAM_RECORD"


class Record:
    """What was found, by bug; in the file that the variable names, if it names one. What is there goes on."""

    def __init__(self, stack: Environment) -> None:
        self._stack = stack
        self._file = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None

    def add(self, bug: Bug, before: Verdict, after: Verdict) -> None:
        """Note what became of a bug, and of the release or the edit without it."""
        if self._file is None:
            return
        edited = "" if isinstance(bug.fixed, str) else f"an edit of {', '.join(edit.file for edit in bug.fixed)}"
        entry = {
            **{name: getattr(bug, name) for name in ("id", "thread", "broken", "release", "matrix", "case", "check")},
            "fixed": edited or bug.fixed,
            "caught": before.finds(bug.check),
            "in_the_release": described(before),
            "without_it": described(after),
            "commit": commit(),
        }
        with locks.exclusive(Path(tempfile.gettempdir()) / f"envbuild-{self._file.name}.lock"):
            known: dict[str, Any] = json.loads(self._file.read_text()) if self._file.is_file() else {"bugs": []}
            bugs = {known_bug["id"]: known_bug for known_bug in known["bugs"]} | {bug.id: entry}
            document = {
                "what": "real bugs of released libraries (./dev soak tests/faults/upstream)",
                "versions": versions(self._stack),
                "machine": machine(),
                "bugs": [bugs[known_bug.id] for known_bug in BUGS if known_bug.id in bugs],
                "not_caught": [dataclasses.asdict(known_bug) for known_bug in NOT_CAUGHT],
            }
            write_atomic(self._file, json.dumps(document, indent=2) + "\n")
