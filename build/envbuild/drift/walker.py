"""Walks one module of the consumer and compares what it imports and calls with what the provider has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from envbuild.drift.bindings import (
    IMPORT_ERRORS,
    OPAQUE,
    ClassDefinition,
    ImportedModule,
    ImportedName,
    Scope,
    absolute,
    caught_names,
    collect,
    function_scope,
)
from envbuild.drift.classes import Callable, Classes
from envbuild.drift.conditions import (
    ATTRIBUTE_ERRORS,
    CALL_ERRORS,
    BranchOutcome,
    Conditions,
    catching,
    ends,
    suppressed,
)
from envbuild.drift.findings import Finding, FindingKind, Moment, Severity
from envbuild.drift.module_index import ModuleTable
from envbuild.drift.relevance import Relevance
from envbuild.drift.signatures import Arguments, Misfit, arguments_of, misfits
from envbuild.drift.symbols import (
    ClassSymbol,
    ExternalSymbol,
    MemberSymbol,
    ModuleSymbol,
    PartialSymbol,
    Presence,
    Reader,
    Symbol,
    full_name,
)
from envbuild.drift.syntax import FunctionNode, children, walk

# Configuration objects that take a function or class and arguments for it, like functools.partial.
_DEFERRED = frozenset(
    f"{module}.{name}" for module in ("nemo_run", "fiddle", "fiddle._src.config") for name in ("Config", "Partial")
)
_LEAVES = ast.Name | ast.Constant
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Location:
    """Where the walk is, and what protects it.

    Attributes:
        caught: errors that a ``try`` around this place catches.
        why: the words for that.
        function: the innermost function; None at import time.
        adapted: whether a test of the provider's version or abilities stands around.
        owner: the class whose method this is.
    """

    scope: Scope
    at: Moment = Moment.IMPORT
    within: str = ""
    caught: frozenset[str] = frozenset()
    function: Scope | None = None
    adapted: bool = False
    owner: ClassDefinition | None = None

    def severity(self, errors: frozenset[str]) -> tuple[Severity, str]:
        """The severity of a failure with one of these errors here, and the reason."""
        if self.adapted:
            return Severity.GUARDED, "under a test of the installed version or of what it has"
        if caught := sorted(self.caught & errors):
            return Severity.GUARDED, f"inside try/except {'' if caught == ['BaseException'] else caught[0]}".rstrip()
        if self.at is Moment.IMPORT:
            return Severity.BREAKS, "runs when the module is imported"
        return Severity.BREAKS, f"runs when {self.within} is called" if self.within else "runs when called"


class Walker:
    """Finds drift in one module."""

    def __init__(self, reader: Reader, classes: Classes, table: ModuleTable) -> None:
        module = table.name
        self.reader = reader
        self.relevance = Relevance(reader, classes, table.scope, table.source)
        self.classes = classes
        self.tables = reader.tables
        self.file = self.tables.file_of(module) or module
        self.conditions = Conditions(reader, self.tables.provider, lost=set(), gained=set())
        self.found: list[Finding] = []
        # The function each finding is in: those of a function defined in a `try` are not what the `try` runs into.
        self._functions: list[Scope | None] = []

    def walk(self, tree: ast.Module, scope: Scope) -> list[Finding]:
        """All findings of the module, in the order of its lines."""
        self._block(tree.body, Location(scope))
        return sorted(self.found, key=lambda finding: (finding.line, finding.name, finding.detail))

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
            self._node(child, place)
        return None if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break) else place

    def _node(self, node: ast.AST, place: Location) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node, place)
        elif isinstance(node, ast.expr):
            self._expression(node, place)
        else:
            for child in children(node):
                self._node(child, place)

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
            inside = replace(inside, at=Moment.FUNCTION)
        if verdict is not BranchOutcome.FALSE:
            self._block(node.body, inside)
        if verdict is not BranchOutcome.TRUE:
            self._block(node.orelse, inside)
        if verdict is BranchOutcome.TRUE and ends(node.body):
            return None
        # `if not is_te_min_version("2.0"): raise` speaks for all that follows.
        return inside if ends(node.body) or ends(node.orelse) else place

    def _assert(self, node: ast.Assert, place: Location) -> Location | None:
        verdict = self.conditions.verdict(node.test, place.scope)
        self._expression(node.test, place)
        if verdict is BranchOutcome.FALSE:
            return None
        return replace(place, adapted=True) if verdict is BranchOutcome.ADAPTED else place

    def _with(self, node: ast.With | ast.AsyncWith, place: Location) -> Location:
        for item in node.items:
            self._expression(item.context_expr, place)
        self._block(node.body, replace(place, caught=place.caught | suppressed(node)))
        return place

    _asyncwith = _with

    def _try(self, node: ast.Try, place: Location) -> Location:
        start = len(self.found)
        every = IMPORT_ERRORS | CALL_ERRORS | ATTRIBUTE_ERRORS
        caught = frozenset().union(*(caught_names(handler) for handler in catching(node, every)))
        self._block(node.body, replace(place, caught=place.caught | caught))
        failing = [i for i in range(start, len(self.found)) if self._functions[i] is place.function]
        if failing and catching(node, IMPORT_ERRORS):
            lost = self._lose(node)
            for i in failing:
                self.found[i] = replace(self.found[i], lost=lost)
        imports_fit = not failing and any(self._imports_provided(statement, place.scope) for statement in node.body)
        if imports_fit:
            self._gain(node, place.scope)
        for handler in node.handlers:
            # What stands in for an import that works is never run.
            if not (imports_fit and handler in catching(node, IMPORT_ERRORS)):
                self._block(handler.body, place)
        if not failing:
            self._block(node.orelse, place)
        self._block(node.finalbody, place)
        return place

    _trystar = _try

    def _lose(self, node: ast.Try) -> tuple[str, ...]:
        """The names that the body of a failing ``try`` does not bind; flags among them are false from here on."""
        inside = Scope("", "", "function")
        collect([*node.body, *node.orelse], inside)
        fallback = Scope("", "", "function")
        for handler in catching(node, IMPORT_ERRORS):
            collect(handler.body, fallback)
        lost = [name for name in inside.bindings if not _replaced_by_import(name, fallback)]
        self.conditions.lost.update(lost)
        return tuple(lost)

    def _gain(self, node: ast.Try, scope: Scope) -> None:
        """The flags that the body sets when it imports nothing but the provider."""
        imports = [statement for statement in node.body if isinstance(statement, ast.Import | ast.ImportFrom)]
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
        for outside in [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]:
            if outside is not None:
                self._expression(outside, place)
        if place.function is None and not self.relevance.may_ask(node, place.owner):
            return place
        prefix = f"{place.within}." if place.within else ""
        scope = function_scope(node, place.scope)
        inside = replace(
            place,
            scope=scope,
            function=scope,
            at=Moment.FUNCTION,
            within=f"{prefix}{node.name}",
            caught=frozenset(),
        )
        self._block(node.body, inside)
        return place

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, place: Location) -> Location:
        for outside in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            self._expression(outside, place)
        definition = next(
            (
                value
                for value in place.scope.bindings.get(node.name, ())
                if isinstance(value, ClassDefinition) and value.bases == tuple(node.bases)
            ),
            None,
        )
        if definition is not None:
            prefix = f"{place.within}." if place.within else ""
            inside = replace(place, scope=definition.body, within=f"{prefix}{node.name}", owner=definition)
            self._block(node.body, inside)
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

    def _lacks(self, module: str, name: str) -> bool:
        return self.tables.provided(module) and self.reader.presence(module, name) is Presence.NO

    def _check_module(self, module: str, node: ast.stmt, place: Location) -> bool:
        if self.reader.module_presence(module) is not Presence.NO:
            return True
        detail = f"there is no module {module}"
        self._report(FindingKind.MISSING_MODULE, module, detail, node, place, IMPORT_ERRORS)
        return False

    # Expressions

    def _expression(self, node: ast.expr, place: Location) -> None:
        match node:
            case ast.Lambda():
                scope = function_scope(node, place.scope)
                caught: frozenset[str] = frozenset()
                inside = replace(place, scope=scope, function=scope, at=Moment.FUNCTION, caught=caught)
                self._expression(node.body, inside)
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._choice(test, [body], [orelse], place)
                return
            case ast.BoolOp(op=ast.And(), values=[first, *rest]):
                self._choice(first, rest, [], place)
                return
            case ast.Attribute():
                self._check_attribute(node, place)
            case ast.Call():
                self._check_call(node, place)
        if isinstance(node, _COMPREHENSIONS):
            place = replace(place, scope=_comprehension_scope(node, place.scope))
        for child in children(node):
            if not isinstance(child, _LEAVES):
                self._node(child, place)

    def _choice(self, test: ast.expr, yes: Iterable[ast.expr], no: Iterable[ast.expr], place: Location) -> None:
        verdict = self.conditions.verdict(test, place.scope)
        self._expression(test, place)
        inside = replace(place, adapted=True) if verdict is BranchOutcome.ADAPTED else place
        for node in yes if verdict is not BranchOutcome.FALSE else ():
            self._expression(node, inside)
        for node in no if verdict is not BranchOutcome.TRUE else ():
            self._expression(node, inside)

    def _check_attribute(self, node: ast.Attribute, place: Location) -> None:
        match self.reader.evaluate(node.value, place.scope):
            case (ModuleSymbol(name=module),) if self._lacks(module, node.attr):
                name = f"{module}.{node.attr}"
                detail = f"{module} has no '{node.attr}'"
                self._report(FindingKind.MISSING_NAME, name, detail, node, place, ATTRIBUTE_ERRORS)
            case (ClassSymbol(definition=definition),) if self.classes.lacks_member(definition, node.attr):
                name = f"{full_name(definition)}.{node.attr}"
                detail = f"{full_name(definition)} has no member '{node.attr}'"
                self._report(FindingKind.MISSING_NAME, name, detail, node, place, ATTRIBUTE_ERRORS)

    def _check_call(self, node: ast.Call, place: Location) -> None:
        targets = self._targets(node.func, place)
        given = arguments_of(node)
        if node.args and targets and all(isinstance(target, ExternalSymbol) for target in targets):
            names = {target.name for target in targets if isinstance(target, ExternalSymbol)}
            if not names <= _DEFERRED | {"functools.partial"}:
                return
            targets = self.reader.evaluate(node.args[0], place.scope)
            # The rest may come later.
            given = replace(arguments_of(node, skip=1), complete=False)
        problems = [self._problems(target, given) for target in targets]
        if not problems or not all(problems):
            return
        # Where several definitions refuse, the first speaks for all.
        first = problems[0][0][0]
        for entry, misfit in (problem for problem in problems[0] if problem[0] is first):
            self._report(misfit.kind, entry.name, f"{entry.name} {misfit.detail}", node, place, CALL_ERRORS)

    def _targets(self, function: ast.expr, place: Location) -> tuple[Symbol, ...]:
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=arguments), attr=name):
                owner = place.owner
                if owner is None or (arguments and getattr(arguments[0], "id", None) != owner.name):
                    return ()
                return (MemberSymbol(owner, name, through_super=True),)
        return self.reader.evaluate(function, place.scope)

    def _problems(self, target: Symbol, given: Arguments) -> list[tuple[Callable, Misfit]]:
        """Why no signature of the target takes these arguments; empty when one does, or none is known."""
        if isinstance(target, PartialSymbol):
            return self._problems(target.target, target.arguments.then(given))
        found: list[tuple[Callable, Misfit]] = []
        for entry in self.classes.callables(target):
            refused = misfits(entry.signature, given, entry.foreign) if entry.provided else ()
            if not refused:
                return []
            found.extend((entry, misfit) for misfit in refused)
        return found

    def _report(
        self,
        kind: FindingKind,
        name: str,
        detail: str,
        node: ast.stmt | ast.expr,
        place: Location,
        errors: frozenset[str],
    ) -> None:
        severity, why = place.severity(errors)
        self._functions.append(place.function)
        self.found.append(
            Finding(
                kind=kind,
                consumer=self.tables.consumer.title,
                provider=self.tables.provider.title,
                file=self.file,
                line=node.lineno,
                name=name,
                detail=detail,
                severity=severity,
                why=why,
                at=place.at,
                within=place.within,
            )
        )


def _comprehension_scope(node: _COMPREHENSIONS, parent: Scope) -> Scope:
    scope = Scope(parent.module, parent.package, "function", parent)
    for generator in node.generators:
        for target in walk(generator.target):
            if isinstance(target, ast.Name):
                scope.add(target.id, OPAQUE)
    return scope


def _replaced_by_import(name: str, fallback: Scope) -> bool:
    return any(isinstance(value, ImportedName | ImportedModule) for value in fallback.bindings.get(name, ()))


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
