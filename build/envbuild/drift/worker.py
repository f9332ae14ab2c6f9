"""The drift check of several pairs in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.files import machine_errors
from envbuild.core.process import ProcessOptions, run
from envbuild.drift.findings import Finding, read_finding

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared: pairs of a consumer and a provider, each by its name in the stack.

    Attributes:
        modules: those that the stack imports, by component.
        users: the components that use a consumer, and that are there to be read.
        unused: files and folders of a consumer that are left out.
    """

    pairs: Sequence[Pair]
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The components whose sources are read."""
        consumers = {consumer for consumer, _ in self.pairs}
        every = [
            *(name for pair in self.pairs for name in pair),
            *(u for c in consumers for u in self.users.get(c, ())),
        ]
        return list(dict.fromkeys(every))


def find_drift_apart(wheels: Mapping[str, Path], comparison: Comparison, folder: Path) -> dict[Pair, list[Finding]]:
    """:func:`find_drift` of each pair.

    Args:
        wheels: where the sources of each of its components are, as a wheel.
        folder: for the answer.

    Raises:
        CheckRefusedError: a wheel cannot be read.
        MachineError: the process was ended from outside.
    """
    request = {"wheels": {name: str(path) for name, path in wheels.items()}, **asdict(comparison)}
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
        answers = json.loads(answer.read_bytes())
    if refused := answers.get("refused"):
        raise CheckRefusedError(refused["what"], why=refused["why"], fix=refused["fix"])
    return {
        pair: [read_finding(fields) for fields in findings]
        for pair, findings in zip(comparison.pairs, answers["findings"], strict=True)
    }
