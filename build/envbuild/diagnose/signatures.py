"""Failure signatures: regular expressions over tools' output, each with its cause, cure and source."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("signatures.json")
# No tool says what went wrong behind so many characters of a line, and some patterns take their square as steps.
LINE_CHARACTERS = 2000


@dataclass(frozen=True)
class Signature:
    """A known failure. ``stage`` says where it shows: lock, build, image, import, run, ..."""

    id: str
    stage: str
    pattern: re.Pattern[str]
    sample: str
    cause: str
    fix: str
    source: str

    def as_json(self) -> dict[str, str]:
        """What is shown where it is found in a text."""
        return {"id": self.id, "cause": self.cause, "fix": self.fix, "source": self.source}


@cache
def signatures() -> tuple[Signature, ...]:
    return tuple(
        Signature(
            id=entry["id"],
            stage=entry["stage"],
            pattern=re.compile(entry["regex"], re.MULTILINE),
            sample=entry["sample"],
            cause=entry["cause"],
            fix=entry["fix"],
            source=entry["source"],
        )
        for entry in json.loads(DATA.read_text())["signatures"]
    )


def match_text(text: str, without: Collection[str] = ()) -> list[Signature]:
    """The known failures whose text occurs, in the order in which they occur; not those of the stages ``without``."""
    # Not splitlines(): to re.MULTILINE a line ends at "\n" alone.
    text = "\n".join(line[:LINE_CHARACTERS] for line in text.split("\n"))
    known = [entry for entry in signatures() if entry.stage not in without]
    hits = [(match.start(), entry) for entry in known if (match := entry.pattern.search(text))]
    # The first failure of a log is most often the cause of the others.
    hits.sort(key=lambda hit: hit[0])
    return [entry for _, entry in hits]
