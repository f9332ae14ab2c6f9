"""Values that a Python module gives its names at its top level, read without running it.

Upstream puts its versions together there: ``".".join(map(str, VERSION[:3])) + "".join(VERSION[3:])``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

Value: TypeAlias = "str | int | tuple[Value, ...]"


def values_of(module: str) -> dict[str, Value | None]:
    """The values of a module's names; None: only running the module would tell.

    Raises:
        SyntaxError: the module is not Python.
    """
    values: dict[str, Value | None] = {}
    for statement in ast.parse(module).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target not in values:
                values[target] = _value(value, values)
            case _:
                # A second assignment too: which one holds, only running the module would tell.
                values |= dict.fromkeys(_changed_by(statement))
    return values


def _changed_by(statement: ast.stmt) -> Iterator[str]:
    """The names whose values a statement may change."""
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and _is_local_label(node):
            # A local label with the commit (PEP 440), where git tells one: sources without a history have none, and a
            # release is asked for without it.
            continue
        if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Assign | ast.For):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def _is_local_label(node: ast.AugAssign) -> bool:
    first = node.value.values[0] if isinstance(node.value, ast.JoinedStr) and node.value.values else node.value
    return isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("+")


def _value(node: ast.expr, values: dict[str, Value | None]) -> Value | None:
    """The value of an expression of constants, names, slices, joins and sums; None for any other."""
    result: Value | None = None
    match node:
        case ast.Constant(value=str() | int() as value):
            result = value
        case ast.Name(id=name):
            result = values.get(name)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            result = _tuple([_value(element, values) for element in elements])
        case ast.Subscript(value=sequence, slice=ast.Slice(step=None) as bounds):
            result = _part(_value(sequence, values), bounds)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            result = _joined("", _tuple([_value(left, values), _value(right, values)]))
        case ast.JoinedStr(values=parts):
            result = _joined("", _texts(_tuple([_value(_bare(part), values) for part in parts])))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as between), attr="join"), args=[sequence]):
            result = _joined(between, _value(sequence, values))
        case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id="str"), sequence]):
            result = _texts(_value(sequence, values))
    return result


def _bare(part: ast.expr) -> ast.expr:
    """What stands between the braces of an f-string; with a conversion or a format, the whole."""
    is_plain = isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None
    return part.value if isinstance(part, ast.FormattedValue) and is_plain else part


def _part(whole: Value | None, bounds: ast.Slice) -> tuple[Value, ...] | None:
    ends: list[int | None] = []
    for end in (bounds.lower, bounds.upper):
        value = end.value if isinstance(end, ast.Constant) else end
        if not isinstance(value, int | None):
            return None
        ends.append(value)
    return whole[ends[0] : ends[1]] if isinstance(whole, tuple) else None


def _tuple(parts: list[Value | None]) -> tuple[Value, ...] | None:
    known = tuple(part for part in parts if part is not None)
    return known if len(known) == len(parts) else None


def _texts(parts: Value | None) -> tuple[Value, ...] | None:
    return tuple(map(str, parts)) if isinstance(parts, tuple) else None


def _joined(between: str, parts: Value | None) -> str | None:
    if not isinstance(parts, tuple):
        return None
    texts = [part for part in parts if isinstance(part, str)]
    return between.join(texts) if len(texts) == len(parts) else None
