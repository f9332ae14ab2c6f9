"""Strict reading of JSON into frozen dataclasses: every key is named and typed, an unknown one is refused.

Fields of a class may be scalars, `Literal`, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, other such classes, and
`object` for anything. A `Rule` in `Annotated` narrows a scalar, a tuple or a mapping. A field with a default may be
absent, but for one with metadata: axes, and what the runner always writes.
"""

import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_SCALARS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


class PlanError(Exception):
    """The plan cannot be run as written: where, what was found, what is allowed."""


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {"ge": operator.ge, "gt": operator.gt, "le": operator.le}


@dataclass(frozen=True)
class Rule:
    """What a value must be; `text` completes "must be". `bounds` are `ge`, `gt` and `le` of a range, or a `pattern`."""

    text: str
    allows: Callable[[Any], bool]
    bounds: Mapping[str, float | str] = field(default_factory=dict, compare=False)


def within(text: str, **bounds: float) -> Rule:
    """Allow the numbers within `ge`, `gt` and `le`."""
    return Rule(text, lambda value: all(_COMPARE[name](value, bound) for name, bound in bounds.items()), bounds)


def at_least(least: int) -> Rule:
    """Allow whole numbers from `least` on."""
    return within(f"a whole number, {least} or more", ge=least)


def up_to(most: int) -> Rule:
    """Allow whole numbers from 1 to `most`."""
    return within(f"a whole number, 1 or more and at most {most}", ge=1, le=most)


def matching(pattern: str, text: str) -> Rule:
    """Allow strings that match a pattern, whole and in ASCII."""
    expression = re.compile(pattern, re.ASCII)
    return Rule(text, lambda value: expression.fullmatch(value) is not None, {"pattern": f"^({pattern})$"})


# A whole number in JSON can be finite and yet too large for a float.
POSITIVE = Rule("a number above 0", lambda value: 0 < value <= sys.float_info.max, {"gt": 0})
NOT_NEGATIVE = Rule("a number, 0 or more", lambda value: 0 <= value <= sys.float_info.max, {"ge": 0})
NOT_EMPTY = Rule("an array of 1 or more", lambda value: len(value) > 0)


def load_json(content: bytes) -> object:
    """Parse UTF-8 JSON; a key that occurs twice in an object is refused, as is anything not finite."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise PlanError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    # json's decoder recurses once a level: a plan of 100,000 brackets ends it with this and not with a JSONDecodeError.
    except RecursionError as error:
        raise PlanError("not JSON that can be read: nested too deeply") from error
    # Python refuses to read numbers of thousands of digits.
    except ValueError as error:
        raise PlanError(f"not JSON that can be read: {error}") from error


# Written by hand: pydantic, jsonschema or msgspec would have to be in the environment under test, whose packages are
# exactly those of its lock.
def read_object(kind: type[T], value: object, where: str, **given: object) -> T:
    """Return a JSON object as the dataclass `kind`; `given` are fields that are not in the document."""
    document = _typed(value, dict, "an object", where)
    hints = _hints(kind)  # type: ignore[arg-type]
    values = dict(given)
    expected = [each for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    for each in expected:
        if each.name in document:
            values[each.name] = _read(hints[each.name], document[each.name], f"{where}.{each.name}")
        # A default with metadata is for rows of a matrix or for the runner: in a document the key was lost.
        elif each.default is MISSING or each.metadata:
            raise PlanError(f"{where}.{each.name}: missing")
    allowed = [each.name for each in expected]
    if unknown := sorted(document.keys() - set(allowed)):
        raise PlanError(f"{where}: unknown key {names(unknown)}; allowed: {names(allowed)}")
    return kind(**values)


@cache
def _hints(kind: type[object]) -> dict[str, object]:
    """Return the types of a dataclass' fields: to evaluate them took a third of the time of reading."""
    return get_type_hints(kind, include_extras=True)


def as_json(value: object) -> dict[str, object]:
    """Return a dataclass as a JSON object."""
    document: dict[str, object] = json.loads(json.dumps(asdict(value)))  # type: ignore[call-overload]
    return document


def _read(kind: Any, value: object, where: str, rule: Rule | None = None) -> Any:
    """Return a JSON value as the type `kind`."""
    # `X | None` is types.UnionType, but typing.Union once X is Annotated: both occur in these classes.
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read(arguments[0], value, where, arguments[1])
    if origin in (Union, UnionType):
        (wanted,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _read(wanted, value, where, rule)
    if is_dataclass(kind):
        return read_object(kind, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        entries = _typed(value, list, "an array", where)
        if rule is not None and not rule.allows(entries):
            raise _refused(value, rule.text, where)
        return tuple(_read(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(entries))
    if origin is Mapping:
        document = _typed(value, dict, "an object", where)
        if rule is not None and not rule.allows(document):
            raise _refused(value, rule.text, where)
        return {key: _read(arguments[1], entry, f"{where}.{key}") for key, entry in document.items()}
    return _read_scalar(kind, value, where, rule)


def _read_scalar(kind: Any, value: object, where: str, rule: Rule | None) -> Any:
    if kind is object:
        return value
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _refused(value, "one of " + names(get_args(kind)), where)
        return value
    # Not isinstance: bool is an int in Python, and `true` is not a number in JSON.
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind or (rule is not None and not rule.allows(value)):
        raise _refused(value, rule.text if rule else _SCALARS[kind], where)
    # A whole number is allowed where a float is wanted: JSON has one type of numbers, and writers drop the ".0".
    return kind(value)


def _typed(value: object, kind: type[T], text: str, where: str) -> T:
    if not isinstance(value, kind):
        raise _refused(value, text, where)
    return value


def _refused(value: object, text: str, where: str) -> PlanError:
    # As JSON, so that the user finds the text of the message in the file.
    shown = json.dumps(value)
    return PlanError(f"{where}: found {shown if len(shown) <= 80 else shown[:77] + '...'}; must be {text}")


def names(values: Iterable[str]) -> str:
    """Return names quoted and separated by commas, "none" when there are none."""
    return ", ".join(repr(name) for name in values) or "none"


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json.loads silently keeps the last of two equal keys.
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise PlanError(f"the key {key!r} occurs twice in one object")
        values[key] = value
    return values


def _refuse_constant(name: str) -> object:
    raise PlanError(f"{name} is not JSON")
