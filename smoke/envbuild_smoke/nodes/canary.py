"""Whether all nodes have the same results folder: each writes a file there that another reads."""

from contextlib import suppress
from pathlib import Path

# A network file system shows a new file of another node late (nfs(5), "acregmax" and negative entries: 60 s).
LIMIT_SECONDS = 70.0


def name_of_canary(nonce: str) -> str:
    """Return the name of node 0's file."""
    return f".canary-{nonce}"


def write(folder: Path, name: str, content: str) -> None:
    """Write a file for another node to read."""
    (folder / name).write_text(content, encoding="utf-8")


def answer(folder: Path, name: str, content: str) -> bool:
    """Return whether node 0's file is there now, and remove it: node 0 sees that this is its folder too."""
    with suppress(OSError):
        # The folder is read anew: an answer of "no such file" may be kept for a while.
        list(folder.iterdir())
        if (folder / name).read_text(encoding="utf-8") == content:
            (folder / name).unlink()
            return True
    return False
