"""Runs the checks on an image, and refuses it when they find something that is not allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import Reporter
from envbuild.core.text import printable
from envbuild.image.checks.contents import ImageContents, ImageFinding
from envbuild.image.checks.rules import RULES
from envbuild.image.record import CheckRecord

# Raised when the same image would be judged otherwise.
FORMAT = 2
# The findings of a check that are printed; the record has all.
PRINTED = 20


def check_image(contents: ImageContents, allow: Collection[str], reporter: Reporter) -> dict[str, CheckRecord]:
    """Run every check; returns what each found, by its code.

    Args:
        allow: codes of checks whose findings do not refuse the image.

    Raises:
        CheckRefusedError: a check found something, and its code is not allowed.
    """
    findings = {code: list(rule(contents)) for code, rule in RULES.items()}
    own = {
        code: [finding for finding in items if not finding.of_base]
        for code, items in findings.items()
        if code not in allow
    }
    if codes := sorted(code for code, items in own.items() if items):
        error = CheckRefusedError(
            f"the image is refused: {', '.join(codes)}",
            why="\n".join(_lines(own)),
            fix="Find the package or base that brings it, and leave it out. To accept it, add "
            f"{' '.join(f'--allow {code}' for code in codes)}; the image's record lists what was allowed.",
        )
        error.codes = frozenset(codes)
        raise error
    for code, items in findings.items():
        for line in _lines({code: items}):
            reporter.note(f"note: {line}")
    return {
        code: CheckRecord(findings=tuple(str(finding) for finding in items), allowed=code in allow)
        for code, items in findings.items()
    }


def _lines(findings: Mapping[str, list[ImageFinding]]) -> list[str]:
    # Names in layers are foreign text.
    lines = [f"{code}: {printable(str(finding))}" for code, items in findings.items() for finding in items]
    return lines if len(lines) <= PRINTED else [*lines[:PRINTED], f"and {len(lines) - PRINTED} more"]
