"""Strict reading of JSON objects: every key is named, typed and taken; what is left over is refused."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Check = Callable[[object], T]


class FieldError(Exception):
    """A JSON document is not what it has to be: where, what was found, what is allowed."""


class Table:
    """A JSON object being read: keys are taken one by one, and `end` refuses those left over."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{where}: found {show(value)}; must be an object")
        self._values: dict[str, object] = dict(value)
        self._taken: list[str] = []
        self._where = where

    def take(self, key: str, check: Check[T]) -> T:
        """Return the checked value of `key`, which must be there."""
        self._taken.append(key)
        if key not in self._values:
            raise FieldError(f"{self._where}.{key}: missing")
        value = self._values.pop(key)
        try:
            return check(value)
        except ValueError as error:
            raise FieldError(f"{self._where}.{key}: found {show(value)}; must be {error}") from None

    def take_or(self, key: str, check: Check[T], default: T) -> T:
        """Return the checked value of `key`, or `default` when it is absent."""
        if key in self._values:
            return self.take(key, check)
        self._taken.append(key)
        return default

    def table(self, key: str) -> "Table":
        """Return the object under `key` for reading."""
        return Table(self.take(key, anything), f"{self._where}.{key}")

    def table_or_null(self, key: str) -> "Table | None":
        """Return the object under `key` for reading, None when it is null."""
        value = self.take(key, anything)
        return None if value is None else Table(value, f"{self._where}.{key}")

    def end(self) -> None:
        """Refuse keys that nobody took."""
        if self._values:
            unknown, allowed = names(self._values), names(self._taken)
            raise FieldError(f"{self._where}: unknown key {unknown}; allowed: {allowed}")


def load_json(content: bytes) -> object:
    """Parse UTF-8 JSON; a key that occurs twice in an object is refused, as is anything not finite."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise FieldError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise FieldError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise FieldError("not a document of ours: nested too deeply") from error


def anything(value: object) -> object:
    """Accept any value; whoever takes it looks at it."""
    return value


def string(value: object) -> str:
    """Accept a string."""
    if not isinstance(value, str):
        raise ValueError("a string")  # noqa: TRY004 - `Table.take` turns every refusal into one kind of error
    return value


def null_or(check: Check[T]) -> Check[T | None]:
    """Accept null, or what `check` accepts."""

    def checked(value: object) -> T | None:
        if value is None:
            return None
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{error}, or null") from None

    return checked


def tuple_of(check: Check[T], least: int = 0) -> Check[tuple[T, ...]]:
    """Accept an array of at least `least` values, each of which `check` accepts."""

    def checked(value: object) -> tuple[T, ...]:
        values = array(value)
        if len(values) < least:
            raise ValueError(f"an array of {least} or more")
        try:
            return tuple(check(entry) for entry in values)
        except ValueError as error:
            raise ValueError(f"an array, each entry {error}") from None

    return checked


def boolean(value: object) -> bool:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - as above
    return value


def whole_number(least: int) -> Check[int]:
    """Accept a whole number of at least `least`."""

    def check(value: object) -> int:
        # bool is an int in Python; `true` is not a number in JSON.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number, {least} or more")
        return value

    return check


def positive_number(value: object) -> float:
    """Accept a finite number above 0."""
    # An int can be finite and yet too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ValueError("a number above 0")
    return float(value)


def array(value: object) -> list[object]:
    """Accept an array."""
    if not isinstance(value, list):
        raise ValueError("an array")  # noqa: TRY004 - as above
    return value


def strings(value: object) -> dict[str, str]:
    """Accept an object whose values are strings."""
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise ValueError("an object whose values are strings")
    return value


def objects(value: object) -> dict[str, object]:
    """Accept an object, whatever it holds."""
    if not isinstance(value, dict):
        raise ValueError("an object")  # noqa: TRY004 - as above
    return value


def one_of(*allowed: str) -> Check[Any]:
    """Accept one of these strings. Any, because the caller knows the Literal that they form."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError("one of " + names(allowed))
        return value

    return check


def show(value: object) -> str:
    """Return a value as JSON, shortened to fit a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def names(values: Iterable[str]) -> str:
    """Return names quoted and separated by commas, "none" when there are none."""
    return ", ".join(repr(name) for name in values) or "none"


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json.loads keeps the last of two equal keys without a word.
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise FieldError(f"the key {key!r} occurs twice in one object")
        values[key] = value
    return values


def _refuse_constant(name: str) -> object:
    raise FieldError(f"{name} is not JSON")
