"""Texts that somebody else wrote, as a terminal may get them."""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """A text in one line: what a terminal would act on, or not show, is written out, line ends too."""
    return _written_out(text, keep="")


def printable_lines(text: str) -> str:
    """The same, with its lines and tabs as they are."""
    return _written_out(text, keep="\n\t")


def _written_out(text: str, keep: str) -> str:
    # str.isprintable: of white space the space alone, and no format characters, such as U+202E, which turns text round.
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape", "backslashreplace").decode("ascii")
        for one in text
    )


def shown(path: Path) -> str:
    """A path as people like to read it: relative to the current directory when it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
