"""Runs the checks on an image, and refuses it where they find something that nobody let pass."""

from __future__ import annotations

from collections.abc import Collection

from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import Reporter
from envbuild.core.text import printable
from envbuild.image.checks.facts import Facts
from envbuild.image.checks.finding import ImageFinding
from envbuild.image.checks.rules import RULES
from envbuild.image.record import CheckRecord

# Raised when the same image would be judged otherwise.
FORMAT = 2
# Of what each check finds, so many are told.
TOLD = 20


def check_image(facts: Facts, allow: Collection[str], reporter: Reporter) -> dict[str, CheckRecord]:
    """Run every check; returns what each found, by its code.

    Args:
        allow: codes of checks whose findings are let pass.

    Raises:
        CheckRefusedError: a check found something, and its code is not allowed.
    """
    found = {code: list(rule(facts)) for code, rule in RULES.items()}
    refused = [item for items in found.values() for item in items if not item.of_base and item.code not in allow]
    if refused:
        codes = sorted({item.code for item in refused})
        raise CheckRefusedError(
            f"the image is refused: {', '.join(codes)}",
            why="\n".join(_lines(refused)),
            fix="Find what puts it there and leave it out. What is right as it is passes with "
            f"{' '.join(f'--allow {code}' for code in codes)}; the image's record then says so.",
            codes=codes,
        )
    for items in found.values():
        for line in _lines(items):
            reporter.note(f"note: {line}")
    return {code: CheckRecord(findings=tuple(_texts(items)), allowed=code in allow) for code, items in found.items()}


def _lines(items: list[ImageFinding]) -> list[str]:
    # Names in layers are whatever somebody wrote.
    lines = [f"{item.code}: {printable(item.text)}" + (" (in the base)" if item.of_base else "") for item in items]
    return lines if len(lines) <= TOLD else [*lines[:TOLD], f"and {len(lines) - TOLD} more"]


def _texts(items: list[ImageFinding]) -> list[str]:
    return [f"{item.text} (in the base)" if item.of_base else item.text for item in items]
