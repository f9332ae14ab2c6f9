"""The drift check of several pairs in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.files import machine_errors
from envbuild.core.process import ProcessOptions, run
from envbuild.drift.findings import Finding, read_finding

Pair = tuple[str, str]


def find_drift_apart(wheels: Mapping[str, Path], pairs: Sequence[Pair], folder: Path) -> dict[Pair, list[Finding]]:
    """:func:`find_drift` of each pair of a consumer and a provider.

    Args:
        wheels: where the sources of each name are, as a wheel.
        folder: for the answer.

    Raises:
        CheckRefusedError: a wheel cannot be read.
        MachineError: the process was ended from outside.
    """
    request = {"wheels": {name: str(path) for name, path in wheels.items()}, "pairs": pairs}
    with machine_errors(folder):
        # The answer does not come over the pipe: Python's own warnings may be in there.
        answer = Path(tempfile.mkdtemp(dir=folder, prefix="drift.")) / "answer.json"
    run(
        # A process, not a thread: reading is all Python, and the lock's other work goes on meanwhile.
        [sys.executable, "-m", "envbuild.drift", answer],
        what="compare the sources of components",
        options=ProcessOptions(
            stdin=json.dumps(request).encode(),
            cwd=answer.parent,
            error=MachineError,
            fix="Run again; where memory is short, with fewer other programs.",
        ),
    )
    with machine_errors(answer):
        found = json.loads(answer.read_bytes())
    if refused := found.get("refused"):
        raise CheckRefusedError(refused["what"], why=refused["why"], fix=refused["fix"])
    return {
        pair: [read_finding(fields) for fields in findings]
        for pair, findings in zip(pairs, found["findings"], strict=True)
    }
