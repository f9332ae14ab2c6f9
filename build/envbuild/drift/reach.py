"""Which findings any code of the consumer can run into.

Generous: names are compared without regard to what they stand for. What is left over is certainly not reached from
inside the consumer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from envbuild.drift.findings import Finding, Moment
from envbuild.drift.sources import SourceTree


def mark_reached(findings: Sequence[Finding], consumer: SourceTree) -> list[Finding]:
    """The findings, with those marked whose function nothing names."""
    named = _named(consumer.files.values(), {part for finding in findings for part in _parts(finding)})
    return [replace(finding, reached=named.issuperset(_parts(finding))) for finding in findings]


def _parts(finding: Finding) -> list[str]:
    """The classes and functions that have to be used for a finding; special methods are, without being named."""
    if finding.at is Moment.IMPORT:
        return []
    return [part for part in finding.within.split(".") if part and not part.endswith("__")]


def _named(texts: Iterable[bytes], names: Iterable[str]) -> set[str]:
    """Those of the names that occur anywhere but after ``def`` or ``class``."""
    rest = set(names)
    used: set[str] = set()
    for text in texts:
        if not rest:
            break
        # Looking for a text is far quicker than for a pattern, and most files have none of them.
        for name in [name for name in rest if name.encode() in text]:
            if re.search(rf"(?<!\bdef )(?<!\bclass )\b{re.escape(name)}\b".encode(), text):
                used.add(name)
                rest.remove(name)
    return used
