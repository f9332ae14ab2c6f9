"""Names in definitions: what a stack names, and the words for a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeAlias

from envbuild.catalog import toml
from envbuild.catalog.models import SINGULAR
from envbuild.catalog.stack import Stack

# Something that a file names: its kind, its name, and where in the file.
Named: TypeAlias = "tuple[str, str, toml.Location]"


def wanted(kind: str, name: str) -> toml.Wanted:
    """What the file of a definition is read for."""
    return toml.Wanted(
        f"the file of {SINGULAR[kind]} {name}",
        why=f"It defines {SINGULAR[kind]} {name}.",
        fix="Put the definition there as a file, or remove what is there.",
    )


def named_by(stack: Stack) -> list[Named]:
    """The matrix, targets and bases that a stack names."""
    # Not in the model, which knows one file: what a stack names may be defined in either envs/.
    matrices = {"matrix": stack.matrix, "gpu_matrix": stack.gpu_matrix}
    named: list[Named] = [("matrices", name, (key,)) for key, name in matrices.items() if name]
    for position, entry in enumerate(stack.builds):
        named.append(("targets", entry.target, ("builds", position, "target")))
        named += [("bases", base, ("builds", position, "bases")) for base in entry.bases]
    return named


def near(name: str, known: list[str]) -> str:
    """For an error: the name that was meant, and all there are."""
    return f"{meant(name, known)}Known: {', '.join(known) or 'none'}."


def meant(name: str, known: Iterable[str]) -> str:
    """For an error: the name that was meant; empty where none is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
