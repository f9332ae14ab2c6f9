"""Which modules of other packages code asks for before it runs: under ``try``, by a flag or by ``find_spec``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from envbuild.drift.bindings import Assigned, Scope
from envbuild.drift.module_index import Tables

Modules = frozenset[str]
NONE: Modules = frozenset()


@dataclass
class OptionalImports:
    """The optional modules of one module of the consumer."""

    tables: Tables
    _names: dict[str, Modules] = field(default_factory=dict, init=False)

    def note(self, body: Iterable[ast.stmt], bound: Iterable[str]) -> Modules:
        """What the body of a ``try`` imports of other packages; ``bound`` are names that tell whether it worked."""
        tops: set[str] = set()
        for statement in body:
            if isinstance(statement, ast.Import):
                tops.update(alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                tops.add(statement.module.partition(".")[0])
        modules = frozenset(filter(self._is_foreign, tops))
        if modules:
            self._names.update(dict.fromkeys(bound, modules))
        return modules

    def needed(self, test: ast.expr, scope: Scope) -> tuple[Modules, Modules]:
        """The modules that are there where a test is true, and where it is false."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yes, no = self.needed(operand, scope)
                return no, yes
            case ast.BoolOp(op=how, values=values):
                needs = [self.needed(value, scope) for value in values]
                # `a and b` says something of both where it is true, `a or b` where it is false.
                if isinstance(how, ast.And):
                    return NONE.union(*(yes for yes, _ in needs)), NONE
                return NONE, NONE.union(*(no for _, no in needs))
            case ast.Compare(left=left, ops=[how], comparators=[ast.Constant(value=None)]):
                yes, no = self.needed(left, scope)
                return (no, yes) if isinstance(how, ast.Is) else (yes, no)
        return self._stated(test, scope), NONE

    def _stated(self, test: ast.expr, scope: Scope) -> Modules:
        """What is there where a name or a call of ``find_spec`` is true."""
        match test:
            case ast.Name(id=name):
                return self._names.get(name) or self._assigned(name, scope)
            case ast.Call(
                func=ast.Name(id="find_spec") | ast.Attribute(attr="find_spec"), args=[ast.Constant(value=str(name))]
            ):
                top = name.partition(".")[0]
                return frozenset({top}) if self._is_foreign(top) else NONE
        return NONE

    def _assigned(self, name: str, scope: Scope) -> Modules:
        """Of a name whose only value is such a test: ``HAVE_X = find_spec("x") is not None``."""
        match scope.values(name):
            case [Assigned(value=ast.Compare() | ast.Call() as value, scope=inside)]:
                return self.needed(value, inside)[0]
        return NONE

    def _is_foreign(self, top: str) -> bool:
        return not (top in sys.stdlib_module_names or self.tables.exists(top) or self.tables.provided(top))
