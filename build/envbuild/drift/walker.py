"""Walks the statements of one module of the consumer, and compares its imports with what the provider has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from envbuild.drift.bindings import (
    IMPORT_ERRORS,
    ClassDefinition,
    ImportedModule,
    ImportedName,
    Scope,
    absolute,
    caught_names,
    collect,
    function_scope,
)
from envbuild.drift.conditions import ATTRIBUTE_ERRORS, CALL_ERRORS, BranchOutcome, catching, ends, suppressed
from envbuild.drift.expressions import ExpressionWalker, Location
from envbuild.drift.findings import Finding, FindingKind, Moment
from envbuild.drift.module_index import ModuleTable
from envbuild.drift.optional import NONE, Modules
from envbuild.drift.symbols import Presence, Reader
from envbuild.drift.syntax import FunctionNode, children, own_statements


class Walker(ExpressionWalker):
    """Finds drift in one module."""

    def walk(self, tree: ast.Module, scope: Scope) -> list[Finding]:
        """All findings of the module, in the order of its lines."""
        self._block(tree.body, Location(scope))
        return sorted(self.findings, key=lambda finding: (finding.line, finding.name, finding.detail))

    # Statements

    def _block(self, statements: Sequence[ast.stmt], place: Location) -> None:
        for statement in statements:
            after = self._statement(statement, place)
            if after is None:
                return
            place = after

    def _statement(self, node: ast.stmt, place: Location) -> Location | None:
        """Walk a statement; what is known after it, or None when nothing after it runs."""
        visit = getattr(self, f"_{type(node).__name__.lower()}", None)
        if visit is not None:
            after: Location | None = visit(node, place)
            return after
        for child in children(node):
            self._part(child, place)
        return None if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break) else place

    def _part(self, node: ast.AST, place: Location) -> None:
        """A statement too, as the cases of a ``match`` hold them."""
        if isinstance(node, ast.stmt):
            self._statement(node, place)
        else:
            super()._part(node, place)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, place: Location) -> Location:
        for child in children(node):
            if isinstance(child, ast.expr):
                self._expression(child, place)
        self._block(node.body, place)
        self._block(node.orelse, place)
        return place

    _for = _asyncfor = _while = _loop

    def _if(self, node: ast.If, place: Location) -> Location | None:
        verdict = self.conditions.verdict(node.test, place.scope)
        self._expression(node.test, place)
        inside = replace(place, adapted=True) if verdict is BranchOutcome.ADAPTED else place
        if _is_main(node.test):
            # Below `if __name__ == "__main__"`: importing the module does not run it.
            inside = replace(inside, at=Moment.FUNCTION)
        there, elsewhere = self.optional.needed(node.test, place.scope)
        if verdict is not BranchOutcome.FALSE:
            self._block(node.body, inside.with_modules(there))
        if verdict is not BranchOutcome.TRUE:
            self._block(node.orelse, inside.with_modules(elsewhere))
        if verdict is BranchOutcome.TRUE and ends(node.body):
            return None
        # `if not is_te_min_version("2.0"): raise` speaks for all that follows.
        if ends(node.body):
            return inside.with_modules(elsewhere)
        return inside.with_modules(there) if ends(node.orelse) else place

    def _assert(self, node: ast.Assert, place: Location) -> Location | None:
        verdict = self.conditions.verdict(node.test, place.scope)
        self._expression(node.test, place)
        # `assert version >= X`: where it fails nothing after it runs.
        if verdict is BranchOutcome.FALSE:
            return None
        place = place.with_modules(self.optional.needed(node.test, place.scope)[0])
        return replace(place, adapted=True) if verdict is BranchOutcome.ADAPTED else place

    def _with(self, node: ast.With | ast.AsyncWith, place: Location) -> Location:
        for manager in node.items:
            self._expression(manager.context_expr, place)
        self._block(node.body, replace(place, caught=place.caught | suppressed(node)))
        return place

    _asyncwith = _with

    def _try(self, node: ast.Try, place: Location) -> Location:
        start = len(self.findings)
        every = IMPORT_ERRORS | CALL_ERRORS | ATTRIBUTE_ERRORS
        caught = frozenset().union(*(caught_names(handler) for handler in catching(node, every)))
        needed = self._optional_imports(node)
        self._block(node.body, replace(place, caught=place.caught | caught).with_modules(needed))
        # A function that is defined in the body runs later, outside of the `try`.
        failing = [i for i in range(start, len(self.findings)) if self._functions[i] is place.function]
        if failing and catching(node, IMPORT_ERRORS):
            lost = self._lose(node)
            for i in failing:
                self.findings[i] = replace(self.findings[i], lost=lost)
        imports_fit = not failing and any(self._imports_provided(statement, place.scope) for statement in node.body)
        if imports_fit:
            self._gain(node, place.scope)
        for handler in node.handlers:
            # What stands in for an import that works is never run.
            if not (imports_fit and handler in catching(node, IMPORT_ERRORS)):
                self._block(handler.body, place)
        # `else` runs only where the body ran through.
        if not failing:
            self._block(node.orelse, place.with_modules(needed))
        self._block(node.finalbody, place)
        return place

    def _optional_imports(self, node: ast.Try) -> Modules:
        """The modules of other packages that the body imports, if a failure is caught."""
        return self.optional.note(node.body, _lost(node)) if catching(node, IMPORT_ERRORS) else NONE

    _trystar = _try

    def _lose(self, node: ast.Try) -> tuple[str, ...]:
        """The names that the body of a failing ``try`` does not bind; flags among them are false from here on."""
        lost = _lost(node)
        self.conditions.lost.update(lost)
        return tuple(lost)

    def _gain(self, node: ast.Try, scope: Scope) -> None:
        """The flags that the body sets when it imports nothing but the provider."""
        imports = [statement for statement in node.body if isinstance(statement, ast.Import | ast.ImportFrom)]
        # The import of another package may fail, and leave the flag false: only the lock knows.
        if all(self._imports_provided(statement, scope) for statement in imports):
            self.conditions.gained.update(
                target.id
                for statement in [*node.body, *node.orelse]
                if isinstance(statement, ast.Assign)
                and isinstance(statement.value, ast.Constant)
                and statement.value.value is True
                for target in statement.targets
                if isinstance(target, ast.Name)
            )

    def _imports_provided(self, statement: ast.stmt, scope: Scope) -> bool:
        if isinstance(statement, ast.ImportFrom):
            return self.tables.provided(absolute(scope, statement.module, statement.level))
        if isinstance(statement, ast.Import):
            return any(self.tables.provided(alias.name) for alias in statement.names)
        return False

    # Definitions

    def _functiondef(self, node: FunctionNode, place: Location) -> Location:
        # Decorators and defaults run where the function is defined.
        for outside in [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]:
            if outside is not None:
                self._expression(outside, place)
        self._block(node.body, place.entering(function_scope(node, place.scope), node.name))
        return place

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, place: Location) -> Location:
        for outside in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            self._expression(outside, place)
        definition = next(
            (
                value
                for value in place.scope.bindings.get(node.name, ())
                # A name may be defined once for each branch; nodes are of one reading, so the bases tell which this is.
                if isinstance(value, ClassDefinition) and value.bases == tuple(node.bases)
            ),
            None,
        )
        if definition is not None:
            within = place.below(node.name)
            self._block(node.body, replace(place, scope=definition.body, within=within, owner=definition))
        return place

    # Imports

    def _import(self, node: ast.Import, place: Location) -> Location:
        for alias in node.names:
            self._check_module(alias.name, node, place)
        return place

    def _importfrom(self, node: ast.ImportFrom, place: Location) -> Location:
        module = absolute(place.scope, node.module, node.level)
        if self._check_module(module, node, place):
            for alias in node.names:
                if alias.name != "*" and self._lacks(module, alias.name):
                    name = f"{module}.{alias.name}"
                    self._report(
                        FindingKind.MISSING_NAME, name, f"{module} has no '{alias.name}'", node, place, IMPORT_ERRORS
                    )
        return place

    def _check_module(self, module: str, node: ast.stmt, place: Location) -> bool:
        if self.reader.module_presence(module) is not Presence.NO:
            return True
        detail = f"there is no module {module}"
        self._report(FindingKind.MISSING_MODULE, module, detail, node, place, IMPORT_ERRORS)
        return False


def failed_imports(reader: Reader, table: ModuleTable, statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that a module does not have from the body of a ``try``, because an import in it fails."""
    for node in own_statements(statements):
        if not isinstance(node, ast.Try) or not catching(node, IMPORT_ERRORS):
            continue
        first = next((i for i, statement in enumerate(node.body) if _fails(reader, statement, table.scope)), None)
        if first is None:
            continue
        fallback = _fallback(node)
        yield from _bound([*node.body[first:], *node.orelse]).bindings
        # What was bound before the failure is still there, unless the handler takes it back.
        yield from (name for name in _bound(node.body[:first]).bindings if name in fallback.bindings)


def _fails(reader: Reader, statement: ast.stmt, scope: Scope) -> bool:
    """Whether a statement imports what the provider does not have."""
    if isinstance(statement, ast.Import):
        return any(reader.module_presence(alias.name) is Presence.NO for alias in statement.names)
    if not isinstance(statement, ast.ImportFrom):
        return False
    module = absolute(scope, statement.module, statement.level)
    if reader.module_presence(module) is Presence.NO:
        return True
    names = [alias.name for alias in statement.names if alias.name != "*"]
    return reader.tables.provided(module) and any(reader.presence(module, name) is Presence.NO for name in names)


def _bound(statements: Iterable[ast.stmt]) -> Scope:
    """What these statements bind."""
    scope = Scope("", "", "function")
    collect(statements, scope)
    return scope


def _fallback(node: ast.Try) -> Scope:
    """What the handlers of a ``try`` bind that stand in for its imports."""
    return _bound(statement for handler in catching(node, IMPORT_ERRORS) for statement in handler.body)


def _lost(node: ast.Try) -> list[str]:
    """What a ``try`` binds only where its imports work; a name that a fallback imports works as well."""
    fallback = _fallback(node)

    def is_imported(name: str) -> bool:
        return any(isinstance(value, ImportedName | ImportedModule) for value in fallback.bindings.get(name, ()))

    return [name for name in _bound([*node.body, *node.orelse]).bindings if not is_imported(name)]


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
