"""A stack that extends another one: how the tables of both files become one document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of one table that say the same thing in two ways: the one that is written takes the place of the other.
_ALTERNATIVES = {"version": "ref", "ref": "version", "value": "value_for_cuda", "value_for_cuda": "value"}


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
