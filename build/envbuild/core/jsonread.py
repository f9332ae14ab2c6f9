"""JSON read strictly: one text has one meaning, and no number that another reader would take for another."""

from __future__ import annotations

import json
import math
from typing import Any

# What other programs read as 64 bits is read so here too.
INTEGER_BITS = 63


def loads(text: str | bytes) -> Any:
    """Parse JSON that a program of ours wrote.

    Raises:
        ValueError: it is none, has a key twice in an object, NaN, an infinity, or a number too large for one.
    """
    try:
        return json.loads(
            text,
            # RFC 8259, 4: of a key that comes twice some readers take the first value and some the last. 6: NaN and
            # Infinity, which Python reads and writes, are not JSON.
            object_pairs_hook=_each_key_once,
            parse_constant=_no_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    # The parser calls itself for each level.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def foreign(text: str | bytes) -> Any:
    """Parse JSON that another program wrote, as most readers do.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("an object has a key twice")
    return table


def _no_constant(word: str) -> None:
    raise ValueError(f"JSON has no {word}")


def _float(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word:.40} is too large")
    return value


def _integer(word: str) -> int:
    value = int(word)
    if abs(value) >> INTEGER_BITS:
        raise ValueError(f"{word:.40} is too large")
    return value
