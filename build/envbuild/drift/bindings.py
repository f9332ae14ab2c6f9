"""What each name of a module, class or function may be bound to, read from its statements.

The order of statements and the outcome of conditions are not followed: a name has all the values that some
statement gives it, and one value that cannot be read makes the name unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Signature

from envbuild.drift.decorators import Decorating, builds_own_class, decorating, returns_name
from envbuild.drift.signatures import signature_of
from envbuild.drift.syntax import FunctionNode, blocks_of, children, walk

IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass(eq=False)
class Scope:
    """A namespace.

    Attributes:
        module: dotted name of the module it is in.
        package: what relative imports in it start from.
        stars: modules that ``from ... import *`` names here.
        open_names: names declared ``global`` or ``nonlocal``: looked up further out.
        walrus: whether ``:=`` occurs in the module, so that expressions have to be searched for it.
    """

    module: str
    package: str
    kind: str
    parent: Scope | None = None
    bindings: dict[str, list[Value]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    open_names: set[str] = field(default_factory=set)
    walrus: bool = True

    def add(self, name: str, value: Value) -> None:
        """One more value that the name may have."""
        self.bindings.setdefault(name, []).append(value)

    def outer(self) -> Scope | None:
        """Where a name that is not bound here is looked up: class bodies are invisible from inside."""
        scope = self.parent
        # Python Language Reference, 4.2.2: names of a class body are not visible in the functions in it.
        while scope is not None and scope.kind == "class":
            scope = scope.parent
        return scope

    def values(self, name: str) -> list[Value]:
        """What a name may be that is used here, from the nearest scope that binds it; empty where none does."""
        scope: Scope | None = self
        while scope is not None and name not in scope.bindings:
            scope = scope.outer()
        return scope.bindings[name] if scope is not None else []


@dataclass(frozen=True)
class ImportedModule:
    """``import a.b as x``, or ``import a.b``, which binds ``a``."""

    module: str


@dataclass(frozen=True)
class ImportedName:
    """``from module import name``."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Assigned:
    """``name = value``, in the scope that gives the value's own names their meaning."""

    value: ast.expr
    scope: Scope


@dataclass(frozen=True)
class Opaque:
    """A value that cannot be read: a parameter, a loop variable, ..."""


OPAQUE = Opaque()


@dataclass(frozen=True, eq=False)
class FunctionDefinition:
    """A ``def``.

    Attributes:
        returns_name: the whole of it, if it may be a decorator that keeps what it decorates: its last word is a name.
    """

    name: str
    qualname: str
    scope: Scope
    arguments: ast.arguments
    decorators: tuple[ast.expr, ...]
    returns_name: FunctionNode | None
    builds_own_class: bool

    @cached_property
    def signature(self) -> Signature:
        """How it is called; of most functions this is never needed."""
        return signature_of(self.arguments)

    @cached_property
    def decorating(self) -> Decorating:
        """What it does to a function that it decorates."""
        return Decorating.UNKNOWN if self.returns_name is None else decorating(self.returns_name)


@dataclass(frozen=True, eq=False)
class FieldDefinition:
    """An annotated name in a class body; ``after_marker``: it follows ``_: KW_ONLY``."""

    name: str
    annotation: ast.expr
    value: ast.expr | None
    after_marker: bool


@dataclass(frozen=True, eq=False)
class ClassDefinition:
    """A ``class``; ``body`` holds its members, ``scope`` is where it stands."""

    name: str
    qualname: str
    scope: Scope
    body: Scope
    bases: tuple[ast.expr, ...]
    metaclass: ast.expr | None
    decorators: tuple[ast.expr, ...]
    fields: tuple[FieldDefinition, ...]


Value = ImportedModule | ImportedName | Assigned | Opaque | FunctionDefinition | ClassDefinition


def caught_names(handler: ast.ExceptHandler) -> frozenset[str]:
    """Names of the exceptions a handler is for; a bare ``except`` and what cannot be read are ``BaseException``."""
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    # `except ImportError or ModuleNotFoundError` catches the first only.
    types = [node.values[0] if isinstance(node, ast.BoolOp) else node for node in types]
    # A bare `except:` has no type, and no name.
    names = (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "BaseException") for node in types)
    # A name without such an ending is a variable, which may hold any exceptions.
    return frozenset(name if name.endswith(("Error", "Exception", "Warning")) else "BaseException" for name in names)


def absolute(scope: Scope, module: str | None, level: int) -> str:
    """The dotted name that an import statement means."""
    if not level:
        return module or ""
    # One dot is the package itself, each further one the package around it (Language Reference, 7.11).
    package = scope.package.split(".")
    parts = package[: len(package) - (level - 1)]
    return ".".join([*parts, module] if module else parts)


def collect(statements: Iterable[ast.stmt], scope: Scope) -> None:
    """Put into ``scope`` what the statements bind."""
    _Collector(scope).block(statements)


def function_scope(node: FunctionNode | ast.Lambda, parent: Scope) -> Scope:
    """The scope inside a function: its parameters, and what its body binds."""
    scope = Scope(parent.module, parent.package, "function", parent, walrus=parent.walrus)
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            # A parameter hides a global name, and may be anything.
            scope.add(argument.arg, OPAQUE)
    if not isinstance(node, ast.Lambda):
        collect(node.body, scope)
    return scope


class _Collector:
    """Walks the statements of one scope."""

    def __init__(self, scope: Scope, prefix: str = "") -> None:
        self.scope = scope
        self.prefix = prefix
        self.fields: list[FieldDefinition] = []
        self._marker_seen = False
        # Names that the body of a `try` has bound; its import handlers only stand in for them.
        self._bound_in_body: frozenset[str] = frozenset()

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            # Like ast.NodeVisitor, by the class of the statement; that one visits expressions too.
            visit = getattr(self, f"_{type(statement).__name__.lower()}", self._other)
            visit(statement)

    def _bind(self, name: str, value: Value) -> None:
        # try: from a import x / except ImportError: x = None: where the import works, x is not None.
        if name not in self._bound_in_body:
            self.scope.add(name, value)

    def _other(self, statement: ast.stmt) -> None:
        """Loops, with, match and whatever comes later: targets are opaque, blocks count as part of the scope."""
        for node in children(statement):
            if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                self._opaque_names(node)
        # children() gives no patterns of a match statement: they belong to its cases.
        for case in getattr(statement, "cases", ()):
            self._opaque_names(case.pattern)
        for block in blocks_of(statement):
            self.block(block)

    def _plain(self, statement: ast.stmt) -> None:
        if self.scope.walrus:
            self._other(statement)
            return
        for block in blocks_of(statement):
            self.block(block)

    _expr = _return = _assert = _raise = _pass = _if = _while = _plain

    def _opaque_names(self, node: ast.AST) -> None:
        for inner in walk(node):
            # `del name` too: its context is ast.Del.
            if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                self._bind(inner.id, OPAQUE)
            elif isinstance(inner, ast.MatchAs | ast.MatchStar) and inner.name:
                self._bind(inner.name, OPAQUE)
            elif isinstance(inner, ast.MatchMapping) and inner.rest:
                self._bind(inner.rest, OPAQUE)

    def _import(self, statement: ast.Import) -> None:
        for alias in statement.names:
            if alias.asname:
                self._bind(alias.asname, ImportedModule(alias.name))
            else:
                # `import a.b` binds `a`; `import a.b as x` binds `a.b`.
                first = alias.name.partition(".")[0]
                self._bind(first, ImportedModule(first))

    def _importfrom(self, statement: ast.ImportFrom) -> None:
        module = absolute(self.scope, statement.module, statement.level)
        for alias in statement.names:
            if alias.name == "*":
                self.scope.stars.append(module)
            else:
                self._bind(alias.asname or alias.name, ImportedName(module, alias.name))

    def _assign(self, statement: ast.Assign) -> None:
        for target in statement.targets:
            if isinstance(target, ast.Name):
                self._bind(target.id, Assigned(statement.value, self.scope))
            else:
                self._opaque_names(target)
        if self.scope.walrus:
            self._opaque_names(statement.value)

    def _annassign(self, statement: ast.AnnAssign) -> None:
        name = statement.target.id if isinstance(statement.target, ast.Name) else None
        if name is None:
            return
        # An annotation alone gives the name no value (PEP 526).
        if statement.value is not None:
            self._bind(name, Assigned(statement.value, self.scope))
            if self.scope.walrus:
                self._opaque_names(statement.value)
        # Annotated names of a class body are the fields of a dataclass, those without a value too.
        if self.scope.kind != "class":
            return
        if getattr(statement.annotation, "attr", getattr(statement.annotation, "id", "")) == "KW_ONLY":
            self._marker_seen = True
        else:
            self.fields.append(FieldDefinition(name, statement.annotation, statement.value, self._marker_seen))

    def _try(self, statement: ast.Try) -> None:
        before = {name: len(values) for name, values in self.scope.bindings.items()}
        self.block(statement.body)
        # `else` runs only where the body ran through: what it binds is no reason to ignore the handlers.
        bound = {name for name, values in self.scope.bindings.items() if len(values) > before.get(name, 0)}
        self.block(statement.orelse)
        for handler in statement.handlers:
            if handler.name:
                self._bind(handler.name, OPAQUE)
            outer = self._bound_in_body
            if caught_names(handler) & IMPORT_ERRORS:
                self._bound_in_body = outer | bound
            self.block(handler.body)
            self._bound_in_body = outer
        self.block(statement.finalbody)

    _trystar = _try

    def _global(self, statement: ast.Global | ast.Nonlocal) -> None:
        self.scope.open_names.update(statement.names)

    _nonlocal = _global

    # A body is not walked here: its names are its own, and are collected when the function is walked.
    def _functiondef(self, node: FunctionNode) -> None:
        self._bind(node.name, self._function(node))

    _asyncfunctiondef = _functiondef

    def _function(self, node: FunctionNode) -> FunctionDefinition:
        return FunctionDefinition(
            name=node.name,
            qualname=f"{self.prefix}{node.name}",
            scope=self.scope,
            arguments=node.args,
            decorators=tuple(node.decorator_list),
            returns_name=node if returns_name(node) else None,
            builds_own_class=builds_own_class(node),
        )

    def _classdef(self, node: ast.ClassDef) -> None:
        qualname = f"{self.prefix}{node.name}"
        inside = _Collector(
            Scope(self.scope.module, self.scope.package, "class", self.scope, walrus=self.scope.walrus), f"{qualname}."
        )
        inside.block(node.body)
        definition = ClassDefinition(
            name=node.name,
            qualname=qualname,
            scope=self.scope,
            body=inside.scope,
            bases=tuple(node.bases),
            metaclass=next((keyword.value for keyword in node.keywords if keyword.arg == "metaclass"), None),
            decorators=tuple(node.decorator_list),
            fields=tuple(inside.fields),
        )
        self._bind(node.name, definition)
