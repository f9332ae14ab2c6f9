"""Texts that somebody else wrote, as a terminal and a shell may get them."""

from __future__ import annotations

import shlex
from pathlib import Path


def quoted_command(*words: str | Path) -> str:
    """A command for people to run: what a shell would act on is quoted, wherever the words come from."""
    return shlex.join(map(str, words))


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
