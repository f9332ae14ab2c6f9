"""tomllib, also on Python 3.10, where its twin from the package index stands in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pragma: no cover - Python 3.10

TOMLDecodeError = tomllib.TOMLDecodeError
# A value that is written.
Toml: TypeAlias = "str | bool | int | Sequence[Toml] | Mapping[str, Toml]"


def loads(text: str) -> dict[str, Any]:
    """Parse TOML text.

    Raises:
        TOMLDecodeError: its message ends with the line and column.
    """
    values: dict[str, Any] = tomllib.loads(text)
    return values


def table_at(document: object, *names: str) -> dict[str, Any]:
    """A table in tables of a document; empty where there is none, or something else."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}
