"""A stack or cluster that extends another one: how the tables of both files become one document."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from envbuild.catalog import toml
from envbuild.catalog.fields import NAME_PATTERN
from envbuild.catalog.models import SINGULAR
from envbuild.catalog.names import near
from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError

# Keys of one table that say the same thing in two ways: the one that is written takes the place of the other.
_ALTERNATIVES = {"version": "ref", "ref": "version", "value": "value_for_cuda", "value_for_cuda": "value"}
# Tables of named tables, and the keys by which one of those stands for itself.
_NAMED: dict[tuple[str, ...], frozenset[str]] = {
    ("components",): frozenset({"version", "git"}),
    ("takeover", "components"): frozenset({"version", "git"}),
    **{(name,): frozenset({"reason"}) for name in ("requirements", "overrides", "environment", "files")},
}
# transformers is no misspelt transformer-engine (0.73).
_CLOSE = 0.85


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a file over those of the file that it extends.

    Tables merge key by key; a list, also one of tables (``[[builds]]``), replaces the whole list.
    """
    replaced = {_ALTERNATIVES[key] for key in over if key in _ALTERNATIVES} - over.keys()
    both = {key: value for key, value in under.items() if key not in replaced}
    for key, value in over.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def extended_by(values: Mapping[str, Any], path: Path, kind: str) -> str | None:
    """The name of the definition of its kind that a file extends; None: it extends none.

    Raises:
        ConfigurationError: it is no name.
    """
    name = values.get("extends")
    if name is None or (isinstance(name, str) and re.match(NAME_PATTERN, name)):
        return name
    singular = SINGULAR[kind]
    raise ConfigurationError(
        f"{toml.where(path, ('extends',))}: extends takes the name of one {singular}",
        why=f"It is {name!r}. A {singular}'s name is that of its file in envs/{kind}/, without .toml.",
        fix=f"Write one of the names that `envbuild list {kind}` prints. For a chain, let that {singular} extend the "
        "next one.",
    )


def not_extending(extended: Path | None, chain: tuple[Path, ...], name: str, kind: str, known: list[str]) -> Path:
    """The file that a file extends.

    Args:
        extended: that file; None: there is none.
        chain: the file, after those that extend it.
        name: what it extends.
        known: all names of the kind.

    Raises:
        ConfigurationError: there is no such file, or it is one of the chain.
    """
    path, singular = chain[-1], SINGULAR[kind]
    place = toml.where(path, ("extends",))
    if extended is not None and extended not in chain:
        return extended
    if extended is not None or name == path.stem:
        raise ConfigurationError(
            f"{place}: {singular} {path.stem} extends itself",
            why=" extends ".join([*(file.stem for file in chain), name]) + ".",
            fix=f"Let one of them extend another {singular}, or none.",
        )
    raise ConfigurationError(
        f"{place}: there is no {singular} {name!r}",
        why=f"extends names it. {near(name, known)}",
        fix=f"Name one of these, or define it in envs/{kind}/{name}.toml.",
    )


def refuse_misspelt(
    values: Mapping[str, Any], under: Mapping[str, Any], path: Path, components: Callable[[], Collection[str]]
) -> None:
    """Look at the tables that a file adds to those of the stack that it extends.

    Args:
        components: the names of every component that some stack has.

    Raises:
        ConfigurationError: one is nearly called as another, and has nothing of its own.
    """
    for location, own in _NAMED.items():
        below = tomlread.table_at(under, *location)
        for name, table in tomlread.table_at(values, *location).items():
            if name in below or not isinstance(table, dict) or own & table.keys():
                continue
            known = {*below, *(components() if location[-1] == "components" else ())}
            near = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
            if near and name not in known:
                key = " or ".join(sorted(own))
                raise ConfigurationError(
                    f"{toml.where(path, (*location, name))}: {'.'.join(location)}.{name} changes nothing of stack "
                    f"{values['extends']}",
                    why=f"Did you mean {near[0]!r}?",
                    fix=f"Correct the name; or, if it is another one, write {key} into its table.",
                )
