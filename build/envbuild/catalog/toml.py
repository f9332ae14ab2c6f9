"""Reads a TOML file into a frozen model.

Errors name the file, the line, the key, what was found and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError

M = TypeVar("M", bound=BaseModel)
Location = tuple["int | str", ...]

_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""")
_AT_LINE = re.compile(r"at line (\d+)")
# What pydantic puts into locations that is in no file: which of two kinds of value something was read as.
_TAGS = ("[key]", "[one]", "[many]")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


@dataclass(frozen=True)
class Wanted:
    """What a file is read for, for the error when it is missing.

    Attributes:
        what: what it is called: "the trust file".
        why: why it is looked for; whole sentences.
        fix: what to do where it is not there.
    """

    what: str
    why: str
    fix: str


def load(path: Path, model: type[M], wanted: Wanted) -> M:
    """Read ``path`` and check it against ``model``.

    Raises:
        ConfigurationError: unreadable, no TOML, or not what the model allows.
    """
    return parse(read(path, wanted), model, str(path))


def read(path: Path, wanted: Wanted) -> str:
    """The text of a file.

    Raises:
        ConfigurationError: it is unreadable.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot read {wanted.what} {path}",
            why=f"{_no_utf8(error)} {wanted.why}",
            fix="Save it as UTF-8 text, as TOML has to be.",
        ) from error
    except OSError as error:
        raise _unread(error, path, wanted) from error


def _no_utf8(error: UnicodeDecodeError) -> str:
    line = error.object.count(b"\n", 0, error.start) + 1
    return f"Line {line} has a byte that is not UTF-8 (0x{error.object[error.start]:02x})."


def _unread(error: OSError, path: Path, wanted: Wanted) -> ConfigurationError:
    if isinstance(error, FileNotFoundError):
        leads = f"It is a symbolic link to {path.readlink()}, where no file is. " if path.is_symlink() else ""
        return ConfigurationError(f"{wanted.what} {path} does not exist", why=leads + wanted.why, fix=wanted.fix)
    if isinstance(error, IsADirectoryError):
        return ConfigurationError(
            f"{wanted.what} {path} is not a file", why=f"It is a directory. {wanted.why}", fix=wanted.fix
        )
    return ConfigurationError(
        f"cannot read {wanted.what} {path}",
        why=f"{error.strerror or error}. {wanted.why}",
        fix="Make it readable for this account: the file itself, and each folder above it needs the right to enter.",
    )


def parse(text: str, model: type[M], name: str) -> M:
    """Check a text called ``name`` against ``model``.

    Raises:
        ConfigurationError: no TOML, or not what the model allows.
    """
    parsed: M = _parsed(text, model, name)
    return parsed


# A command reads the same files of envs/ several times over, and models are frozen.
@lru_cache(maxsize=256)
def _parsed(text: str, model: type[BaseModel], name: str) -> Any:
    return check(values_of(text, name), text, model, name)


def values_of(text: str, name: str) -> dict[str, Any]:
    """The tables of a text called ``name``.

    Raises:
        ConfigurationError: no TOML.
    """
    try:
        return tomlread.loads(text)
    except tomlread.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        # "at end of document" has no number: something was opened and never closed.
        line = int(at[1]) if at else len(text.splitlines())
        raise ConfigurationError(
            f"{name}:{line}: no valid TOML",
            why=f"{error}\n    {_line(text, line)}",
            fix="Correct the line; https://toml.io describes the format.",
        ) from error


def check(values: Mapping[str, Any], text: str, model: type[M], name: str) -> M:
    """Check tables against ``model``; ``text`` is the file that has the lines of what is wrong.

    Raises:
        ConfigurationError: they are not what the model allows.
    """
    try:
        # JSON is what pydantic reads strictly: arrays as tuples and strings as enums, but no "5" or true as 5. It has
        # no dates, and nor has any model: they become something of the wrong kind.
        return model.model_validate_json(json.dumps(values, default=lambda _: {}), strict=True)
    except ValidationError as error:
        lines = line_numbers(text)
        details = error.errors(include_url=False)
        wrong_inside = {tuple(problem["loc"])[:length] for problem in details for length in range(len(problem["loc"]))}
        # A list that is too short only because its items are wrong is not worth a line.
        reported = [
            detail for detail in details if detail["type"] != "too_short" or tuple(detail["loc"]) not in wrong_inside
        ]
        problems = [_describe(problem, model, lines) for problem in reported]
        first = lines_for(_location(reported[0]), lines)
        raise ConfigurationError(
            f"{name}:{first}: {len(problems)} thing{'s' if len(problems) > 1 else ''} to correct",
            why="\n".join(problems),
            fix="Correct the keys named above; `envbuild schema` writes JSON schemas that editors check against.",
        ) from error


def where(path: Path, location: Location) -> str:
    """``file:line`` of a key of a file."""
    return f"{path}:{lines_for(location, line_numbers(path.read_text(encoding='utf-8')))}"


def line_numbers(text: str) -> dict[Location, int]:
    """The line (from 1) of every table header and key of a TOML text, by its path."""
    # Neither tomllib nor tomlkit gives the lines of keys. Only headers and keys at the beginning of a line are found;
    # what is inside of a value has the line of its key.
    lines: dict[Location, int] = {}
    arrays: dict[Location, int] = {}
    prefix: Location = ()
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            if closing in line:
                closing = ""
            continue
        if header := _HEADER.match(line):
            parts = _parts(header[2])
            if header[1] == "[[":
                base = _resolve(parts, arrays)
                arrays[base] = arrays.get(base, -1) + 1
                prefix = (*base, arrays[base])
            else:
                prefix = _resolve(parts, arrays, whole=True)
            lines.setdefault(prefix, number)
        elif key := _KEY.match(line):
            lines.setdefault((*prefix, *_parts(key[1])), number)
            value = line[key.end() :]
            for quote in ('"""', "'''"):
                # Opened here and closed on a later line: until then no line is a key.
                if value.count(quote) == 1:
                    closing = quote
    return lines


def _resolve(parts: Location, arrays: dict[Location, int], *, whole: bool = False) -> Location:
    path: Location = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        if path in arrays and (whole or position < len(parts) - 1):
            path = (*path, arrays[path])
    return path


def _parts(dotted: str) -> Location:
    return tuple(a or b or c for a, b, c in _PART.findall(dotted))


def lines_for(location: Location, lines: dict[Location, int]) -> int:
    """The line of ``location`` or of the nearest thing around it."""
    while location:
        if location in lines:
            return lines[location]
        location = location[:-1]
    return 1


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _location(problem: Any) -> Location:
    inside: Location = getattr(problem.get("ctx", {}).get("error"), "location", ())
    return (*(part for part in problem["loc"] if part not in _TAGS), *inside)


def _describe(problem: Any, model: type[BaseModel], lines: dict[Location, int]) -> str:
    location = _location(problem)
    value, context = problem["input"], problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            allowed = fields_at(model, location[:-1])
            near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            text = f"unknown key{meant} Allowed here: {', '.join(allowed) or 'nothing'}"
        case "missing":
            text = "this key is required and missing"
        case "enum" | "literal_error":
            text = f"found {value!r}; allowed: {context['expected']}"
        case "string_pattern_mismatch":
            text = f"found {value!r}; must match {context['pattern']}"
        case "too_short":
            text = f"needs at least {context['min_length']} item; has {context['actual_length']}"
        case "value_error":
            text = str(context["error"])
        case _:
            shown = f"; found {value!r}" if not isinstance(value, (dict, list)) else ""
            text = f"{problem['msg'].lower()}{shown}"
    return f"line {lines_for(location, lines)}, {dotted(location)}: {text}"


def fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that ``model`` allows at ``location``."""
    schema: Any = model.model_json_schema()
    node: Any = schema
    # The schema and not the model: a location may lead through unions, lists and dictionaries.
    for part in location:
        node = _follow(schema, node)
        if isinstance(part, int):
            node = node.get("items", {})
        else:
            by_pattern = next(iter(node.get("patternProperties", {}).values()), None)
            node = node.get("properties", {}).get(part) or by_pattern or node.get("additionalProperties") or {}
    node = _follow(schema, node)
    return list(node.get("properties", {}))


def _follow(schema: Any, node: Any) -> Any:
    # With keys of its own, anyOf says which of them are required.
    while isinstance(node, dict) and "properties" not in node and ("$ref" in node or "anyOf" in node):
        # A table that may be left out is one of two: itself, or null.
        tables = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else next(iter(tables), {})
    return node if isinstance(node, dict) else {}


def dotted(location: Location) -> str:
    """``("builds", 0, "bases")`` as people write it: ``builds[0].bases``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the file"
