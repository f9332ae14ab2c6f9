"""Compares the expressions of one module of the consumer with what the provider has: attributes and calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from envbuild.drift.bindings import OPAQUE, ClassDefinition, Scope, function_scope
from envbuild.drift.classes import Callable, Classes
from envbuild.drift.conditions import ATTRIBUTE_ERRORS, CALL_ERRORS, BranchOutcome, Conditions
from envbuild.drift.findings import Finding, FindingKind, Moment, Severity
from envbuild.drift.module_index import ModuleTable
from envbuild.drift.optional import NONE, Modules, OptionalImports
from envbuild.drift.signatures import CallArguments, Misfit, arguments_of, misfits
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
from envbuild.drift.syntax import children, walk

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
        within: the words for that.
        function: the innermost function; None at import time.
        adapted: whether a test of the provider's version or abilities stands around.
        owner: the class whose method this is.
        optional: modules of other packages that are there wherever this runs.
    """

    scope: Scope
    at: Moment = Moment.IMPORT
    within: str = ""
    caught: frozenset[str] = frozenset()
    function: Scope | None = None
    adapted: bool = False
    owner: ClassDefinition | None = None
    optional: Modules = NONE

    def severity(self, errors: frozenset[str]) -> tuple[Severity, str]:
        """The severity of a failure with one of these errors here, and the reason."""
        if self.adapted:
            return Severity.GUARDED, "under a test of the installed version or of what it has"
        if caught := sorted(self.caught & errors):
            return Severity.GUARDED, f"inside try/except {'' if caught == ['BaseException'] else caught[0]}".rstrip()
        if self.at is Moment.IMPORT:
            return Severity.BREAKS, "runs when the module is imported"
        return Severity.BREAKS, f"runs when {self.within} is called" if self.within else "runs when called"

    def entering(self, scope: Scope, name: str = "") -> Location:
        """The location inside a function; what is around its definition does not protect its calls."""
        return replace(
            self, scope=scope, function=scope, at=Moment.FUNCTION, within=self.below(name), caught=frozenset()
        )

    def with_modules(self, modules: Modules) -> Location:
        """The location where these modules are there too."""
        return replace(self, optional=self.optional | modules) if modules else self

    def below(self, name: str) -> str:
        """The dotted name of a definition here; without a name, that of where this is."""
        return ".".join(filter(None, (self.within, name)))


class ExpressionWalker:
    """Finds drift in expressions."""

    def __init__(self, reader: Reader, classes: Classes, table: ModuleTable) -> None:
        self.reader = reader
        self.classes = classes
        self.tables = reader.tables
        self.file = self.tables.file_of(table.name) or table.name
        self.conditions = Conditions(reader, self.tables.provider, lost=set(), gained=set())
        self.optional = OptionalImports(self.tables)
        self.findings: list[Finding] = []
        # The function each finding is in: those of a function defined in a `try` are not what the `try` runs into.
        self._functions: list[Scope | None] = []

    def _lacks(self, module: str, name: str) -> bool:
        return self.tables.provided(module) and self.reader.presence(module, name) is Presence.NO

    def _part(self, node: ast.AST, place: Location) -> None:
        """An expression, or what holds expressions: a keyword, a comprehension."""
        if isinstance(node, ast.expr):
            self._expression(node, place)
        else:
            for child in children(node):
                self._part(child, place)

    def _expression(self, node: ast.expr, place: Location) -> None:
        match node:
            case ast.Lambda():
                self._expression(node.body, place.entering(function_scope(node, place.scope)))
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._choice(test, [body], [orelse], place)
                return
            # `b` of `a and b` runs only where a holds, as below an `if`.
            case ast.BoolOp(op=ast.And(), values=[first, *rest]):
                self._choice(first, rest, [], place)
                return
            case ast.Attribute():
                self._check_attribute(node, place)
            case ast.Call():
                self._check_call(node, place)
        # A comprehension has a scope of its own: its loop variable hides an import of the same name.
        if isinstance(node, _COMPREHENSIONS):
            place = replace(place, scope=_comprehension_scope(node, place.scope))
        for child in children(node):
            if not isinstance(child, _LEAVES):
                self._part(child, place)

    def _choice(self, test: ast.expr, yes: Iterable[ast.expr], no: Iterable[ast.expr], place: Location) -> None:
        verdict = self.conditions.verdict(test, place.scope)
        self._expression(test, place)
        inside = replace(place, adapted=True) if verdict is BranchOutcome.ADAPTED else place
        there, elsewhere = self.optional.needed(test, place.scope)
        for node in yes if verdict is not BranchOutcome.FALSE else ():
            self._expression(node, inside.with_modules(there))
        for node in no if verdict is not BranchOutcome.TRUE else ():
            self._expression(node, inside.with_modules(elsewhere))

    def _check_attribute(self, node: ast.Attribute, place: Location) -> None:
        match self.reader.evaluate(node.value, place.scope):
            case (ModuleSymbol(name=holder),) if self._lacks(holder, node.attr):
                detail = f"{holder} has no '{node.attr}'"
            case (ClassSymbol(definition=definition),) if self.classes.lacks_member(definition, node.attr):
                holder = full_name(definition)
                detail = f"{holder} has no member '{node.attr}'"
            case _:
                return
        self._report(FindingKind.MISSING_NAME, f"{holder}.{node.attr}", detail, node, place, ATTRIBUTE_ERRORS)

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
        # A name may stand for several definitions (one for each branch): a call is wrong if all of them refuse it.
        if not problems or not all(problems):
            return
        # Where several definitions refuse, the first speaks for all.
        first = problems[0][0][0]
        for entry, misfit in (problem for problem in problems[0] if problem[0] is first):
            self._report(misfit.kind, entry.name, f"{entry.name} {misfit.detail}", node, place, CALL_ERRORS)

    def _targets(self, function: ast.expr, place: Location) -> tuple[Symbol, ...]:
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=arguments), attr=name):
                # super() of another class than the one around it is not followed.
                owner = place.owner
                if owner is None or (arguments and getattr(arguments[0], "id", None) != owner.name):
                    return ()
                return (MemberSymbol(owner, name, through_super=True),)
        return self.reader.evaluate(function, place.scope)

    def _problems(self, target: Symbol, given: CallArguments) -> list[tuple[Callable, Misfit]]:
        """Why no signature of the target takes these arguments; empty when one does, or none is known."""
        # functools.partial keeps its arguments: they count in the later call.
        if isinstance(target, PartialSymbol):
            return self._problems(target.target, target.arguments.then(given))
        problems: list[tuple[Callable, Misfit]] = []
        for entry in self.classes.callables(target):
            refused = misfits(entry.signature, given, entry.foreign) if entry.provided else ()
            if not refused:
                return []
            problems.extend((entry, misfit) for misfit in refused)
        return problems

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
        self.findings.append(
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
                optional=tuple(sorted(place.optional)),
            )
        )


def _comprehension_scope(node: _COMPREHENSIONS, parent: Scope) -> Scope:
    scope = Scope(parent.module, parent.package, "function", parent)
    for generator in node.generators:
        for target in walk(generator.target):
            if isinstance(target, ast.Name):
                scope.add(target.id, OPAQUE)
    return scope
