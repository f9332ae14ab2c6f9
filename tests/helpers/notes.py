"""A reporter that keeps its notes."""

from __future__ import annotations

from envbuild.core.progress import SilentReporter


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)
