"""What an expression stands for, as far as reading can tell."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from envbuild.drift.bindings import (
    Assigned,
    ClassDefinition,
    FunctionDefinition,
    ImportedModule,
    ImportedName,
    Scope,
    Value,
)
from envbuild.drift.module_index import ModuleTable, Tables
from envbuild.drift.signatures import CallArguments, arguments_of
from envbuild.drift.sources import parents

PARTIALS = frozenset({"functools.partial"})


@dataclass(frozen=True)
class ModuleSymbol:
    name: str


@dataclass(frozen=True)
class FunctionSymbol:
    definition: FunctionDefinition


@dataclass(frozen=True)
class ClassSymbol:
    definition: ClassDefinition


@dataclass(frozen=True)
class MemberSymbol:
    """``Class.name``, or ``super().name`` in a method of the class; which of its bases has it is not looked up yet."""

    definition: ClassDefinition
    name: str
    through_super: bool = False


@dataclass(frozen=True)
class ExternalSymbol:
    """Something of neither tree, by its dotted name."""

    name: str


@dataclass(frozen=True)
class PartialSymbol:
    target: Symbol
    arguments: CallArguments


@dataclass(frozen=True)
class UnknownSymbol:
    """Anything at all."""


UNKNOWN = UnknownSymbol()
Symbol = ModuleSymbol | FunctionSymbol | ClassSymbol | MemberSymbol | ExternalSymbol | PartialSymbol | UnknownSymbol
Symbols = tuple[Symbol, ...]


class Presence(Enum):
    """Whether a module has a name."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Reader:
    """Follows names through assignments, imports, re-exports and star imports of both trees.

    Attributes:
        patched: (module or ``module.Class``, name) of everything that some module sets from outside; a name None
            stands for all names.
        replaced: modules that are put into ``sys.modules`` by hand.
        lost: (module, name) of what the body of a ``try`` would bind if an import in it did not fail.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.patched: set[tuple[str, str | None]] = set()
        self.replaced: set[str] = set()
        self.lost: set[tuple[str, str]] = set()
        self._members: dict[tuple[str, str], Symbols] = {}
        self._locals: dict[tuple[Scope, str], Symbols] = {}

    def evaluate(self, node: ast.expr, scope: Scope) -> Symbols:
        """What an expression may be; ``None`` is left out, since a call of it fails anyway."""
        match node:
            case ast.Name(id=name):
                return self.lookup(name, scope)
            case ast.Attribute(value=base, attr=name):
                return _union(self.attribute(symbol, name) for symbol in self.evaluate(base, scope))
            # x = None before an import: a call of None fails with every version.
            case ast.Constant(value=None):
                return ()
            case ast.IfExp(body=body, orelse=orelse):
                return _union((self.evaluate(body, scope), self.evaluate(orelse, scope)))
            case ast.Call(func=function, args=[target, *_]) if self.is_one_of(PARTIALS, function, scope):
                given = arguments_of(node, skip=1)
                return tuple(PartialSymbol(symbol, given) for symbol in self.evaluate(target, scope))
            case _:
                return (UNKNOWN,)

    def is_one_of(self, names: Collection[str], node: ast.expr, scope: Scope) -> bool:
        """Whether an expression can only stand for one of these things of neither tree."""
        symbols = self.evaluate(node, scope)
        return bool(symbols) and all(isinstance(symbol, ExternalSymbol) and symbol.name in names for symbol in symbols)

    def lookup(self, name: str, scope: Scope) -> Symbols:
        """What a name may be in a scope."""
        where: Scope | None = scope
        while where is not None and where.kind != "module":
            if name in where.bindings and name not in where.open_names:
                return self._local(where, name)
            where = where.outer()
        if where is None:
            return (UNKNOWN,)
        if name in where.bindings or where.stars:
            return self.member(where.module, name)
        table = self.tables.table(where.module)
        # Where a module makes names at run time, one of them may hide a builtin.
        if hasattr(builtins, name) and table is not None and not table.dynamic:
            return (ExternalSymbol(f"builtins.{name}"),)
        return (UNKNOWN,)

    def _local(self, scope: Scope, name: str) -> Symbols:
        key = (scope, name)
        if key not in self._locals:
            # A name defined through itself is what is asked for here again: unlike an import cycle, it has changed.
            self._locals[key] = (UNKNOWN,)
            self._locals[key] = _union(map(self._value, scope.bindings[name]))
        return self._locals[key]

    def _value(self, value: Value) -> Symbols:
        match value:
            case ImportedModule(module=module):
                return (self._module(module),)
            case ImportedName(module=module, name=name):
                return self.member(module, name)
            case Assigned(value=expression, scope=scope):
                return self.evaluate(expression, scope)
            case FunctionDefinition():
                return (FunctionSymbol(value),)
            case ClassDefinition():
                return (ClassSymbol(value),)
        return (UNKNOWN,)

    def _module(self, name: str) -> Symbol:
        if self.tables.exists(name):
            return ModuleSymbol(name)
        # A module that the provider lacks is reported where it is imported; what it would have is not judged again.
        return UNKNOWN if self.tables.provided(name) else ExternalSymbol(name)

    def forget(self) -> None:
        """Look everything up anew: patches have become known."""
        self._members.clear()
        self._locals.clear()

    def member(self, module: str, name: str) -> Symbols:
        """What a module's name may be."""
        key = (module, name)
        if key not in self._members:
            # A name defined through itself is what is asked for here again: it adds nothing.
            self._members[key] = ()
            self._members[key] = self._member(module, name)
        return self._members[key]

    def _member(self, module: str, name: str) -> Symbols:
        if module in self.replaced or {(module, name), (module, None)} & self.patched or (module, name) in self.lost:
            return (UNKNOWN,)
        if not self.tables.exists(module):
            return (UNKNOWN,) if self.tables.provided(module) else (ExternalSymbol(f"{module}.{name}"),)
        inner = f"{module}.{name}"
        submodule: Symbols = (ModuleSymbol(inner),) if self.tables.exists(inner) else ()
        table = self.tables.table(module)
        if table is None:
            return submodule or (UNKNOWN,)
        values = table.scope.bindings.get(name)
        if values:
            # `from . import ops` in a package's __init__ names the submodule `ops`, and not itself.
            itself = ImportedName(module, name)
            symbols = _union(self._value(value) for value in values if value != itself)
            return _union((symbols, submodule)) or ((UNKNOWN,) if itself in values else ())
        if submodule:
            return submodule
        symbols = _union(self.member(star, name) for star in self._stars_with(table, name))
        return symbols or (UNKNOWN,)

    def _stars_with(self, table: ModuleTable, name: str) -> list[str]:
        return [star for star in table.scope.stars if self._through_star(star, name, frozenset()) is not Presence.NO]

    def _through_star(self, module: str, name: str, seen: frozenset[str]) -> Presence:
        """Whether ``from module import *`` brings a name; ``seen`` are the modules on the way, which add nothing."""
        if module in seen:
            return Presence.NO
        table = self.tables.table(module)
        if table is None:
            return Presence.UNKNOWN
        # `__all__` decides what a star brings; without it, all names without an underscore (Language Reference, 7.11).
        if table.exported is not None:
            return Presence.YES if name in table.exported else Presence.NO
        if "__all__" in table.scope.bindings:
            return Presence.UNKNOWN
        return Presence.NO if name.startswith("_") else self.presence(module, name, seen)

    def presence(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Presence:
        """Whether a module certainly has, or certainly lacks, a name."""
        if self.module_presence(module) is not Presence.YES or self.tables.is_compiled(module):
            return Presence.UNKNOWN
        # Python itself sets __file__, __path__ and others on modules.
        if {(module, name), (module, None)} & self.patched or (name.startswith("__") and name.endswith("__")):
            return Presence.UNKNOWN
        table = self.tables.table(module)
        if (table and name in table.scope.bindings) or self.tables.exists(f"{module}.{name}"):
            return Presence.YES
        if table is None:
            # A source that cannot be parsed may have any name, a folder without __init__.py only modules (PEP 420).
            has_source = self.tables.file_of(module) is not None
            return Presence.UNKNOWN if has_source or not self.tables.provided(module) else Presence.NO
        stars = {self._through_star(star, name, seen | {module}) for star in table.scope.stars}
        if Presence.YES in stars:
            return Presence.YES
        unsure = table.dynamic or table.searches_elsewhere or Presence.UNKNOWN in stars
        return Presence.UNKNOWN if unsure else Presence.NO

    def module_presence(self, module: str) -> Presence:
        """Whether a module certainly exists, or is certainly missing from the provider."""
        if module in self.replaced or any(parent in self.replaced for parent in parents(module)):
            return Presence.UNKNOWN
        if self.tables.exists(module):
            return Presence.YES
        if not self.tables.provided(module):
            return Presence.UNKNOWN
        # A compiled module may have submodules of its own making, and nothing shows them.
        holder = next((parent for parent in parents(module) if self.tables.exists(parent)), None)
        if holder is None or self.tables.is_compiled(holder):
            return Presence.UNKNOWN
        table = self.tables.table(holder)
        searches_elsewhere = table is not None and table.searches_elsewhere
        unread = table is None and self.tables.file_of(holder) is not None
        return Presence.UNKNOWN if searches_elsewhere or unread else Presence.NO

    def attribute(self, symbol: Symbol, name: str) -> Symbols:
        """What ``symbol.name`` may be."""
        match symbol:
            case ModuleSymbol(name=module):
                return self.member(module, name)
            case ExternalSymbol(name=dotted):
                return (ExternalSymbol(f"{dotted}.{name}"),)
            case ClassSymbol(definition=definition):
                return (MemberSymbol(definition, name),)
        return (UNKNOWN,)


def full_name(definition: ClassDefinition | FunctionDefinition) -> str:
    """The dotted name of a definition."""
    return f"{definition.scope.module}.{definition.qualname}"


def _union(groups: Iterable[Symbols]) -> Symbols:
    symbols: dict[Symbol, None] = {}
    for group in groups:
        symbols.update(dict.fromkeys(group))
    return tuple(symbols)
