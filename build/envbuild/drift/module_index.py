"""Modules of the consumer and the provider, each parsed once and reduced to what its names are bound to."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from envbuild.drift.bindings import Assigned, Scope, collect, function_scope
from envbuild.drift.sources import SourceTree, parents
from envbuild.drift.syntax import FunctionNode, every_statement, own_statements, walk

# The statement, and not a word in a name.
_GLOBAL = re.compile(rb"(?:^|[:;])[ \t]*global[ \t\\]", re.MULTILINE)
# A module that does one of these may have names that no statement of it shows.
_SELF_MADE = (b"globals()", b"sys.modules[", b"vars()", b"locals()[", b"exec(", b"setattr(sys.modules")


@dataclass(frozen=True, eq=False)
class AttributePatch:
    """``target.name = ...`` anywhere in a module; ``name`` is None when it is computed."""

    target: ast.expr
    name: str | None


@dataclass(frozen=True, eq=False)
class ModuleTable:
    """What is known about one module.

    Attributes:
        dynamic: it may have names that cannot be read here.
        searches_elsewhere: it changes where its submodules are looked for.
        exported: its ``__all__``; None when it has none, or a computed one.
    """

    name: str
    scope: Scope
    dynamic: bool
    searches_elsewhere: bool
    exported: frozenset[str] | None


@dataclass(frozen=True, eq=False)
class Patches:
    """What a module does to others.

    Attributes:
        patches: attributes it sets on other things.
        scope: the module's names and every import inside its functions, to find out what is patched.
        replaced: modules it puts into ``sys.modules``.
    """

    patches: tuple[AttributePatch, ...]
    scope: Scope
    replaced: frozenset[str]


@dataclass(frozen=True, eq=False)
class _Reading:
    """What reading a module gave: its names, or why it cannot be parsed."""

    table: ModuleTable | None
    reason: str = ""


# By tree and module, for as long as the tree is there: a component is compared with more than one other.
_READ: WeakKeyDictionary[SourceTree, dict[str, _Reading]] = WeakKeyDictionary()


class Tables:
    """The modules of both trees by dotted name."""

    def __init__(self, consumer: SourceTree, provider: SourceTree) -> None:
        self.consumer = consumer
        self.provider = provider
        self.unreadable: dict[str, str] = {}
        self._tables: dict[str, ModuleTable | None] = {}

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        return {**self.consumer.modules, **self.provider.modules}

    @cached_property
    def _packages(self) -> frozenset[str]:
        # A folder without __init__.py is a package as well (PEP 420).
        everything = {*self._modules, *self.consumer.compiled, *self.provider.compiled}
        return frozenset(parent for module in everything for parent in parents(module))

    def exists(self, module: str) -> bool:
        """Whether there is a module, compiled extension or package (with or without ``__init__.py``) of that name."""
        return module in self._modules or module in self._packages or self.is_compiled(module)

    def is_compiled(self, module: str) -> bool:
        return module in self.consumer.compiled or module in self.provider.compiled

    def file_of(self, module: str) -> str | None:
        """Path of a module's source."""
        return self._modules.get(module)

    def provided(self, module: str) -> bool:
        """Whether a module of this name would belong to the provider, and to no other distribution."""
        return any(name in self.provider.roots for name in (module, *parents(module)))

    def table(self, module: str) -> ModuleTable | None:
        """The names of a module; None when it has no source, or none that can be parsed."""
        if module not in self._tables:
            self._tables[module] = self._read(module)
        return self._tables[module]

    def with_syntax(self, module: str) -> tuple[ModuleTable, ast.Module] | None:
        """The names of a module and the syntax tree that they are from; None when it cannot be parsed.

        Trees are what takes memory: none is kept here.
        """
        reading, tree = self._parse(module)
        table = self._keep(module, reading)
        return None if table is None or tree is None else (table, tree)

    def _owner(self, module: str) -> SourceTree:
        return self.provider if module in self.provider.modules else self.consumer

    def _read(self, module: str) -> ModuleTable | None:
        if module not in self._modules:
            return None
        known = _READ.get(self._owner(module), {}).get(module)
        return self._keep(module, known or self._parse(module)[0])

    def _parse(self, module: str) -> tuple[_Reading, ast.Module | None]:
        owner = self._owner(module)
        try:
            tree = parse(owner.files[owner.modules[module]])
        # ValueError: null bytes in the text, before Python 3.12.
        except (SyntaxError, ValueError, RecursionError) as error:
            return _Reading(None, str(error)), None
        return _Reading(_table(owner, module, tree)), tree

    def _keep(self, module: str, reading: _Reading) -> ModuleTable | None:
        _READ.setdefault(self._owner(module), {})[module] = reading
        self._tables[module] = reading.table
        if reading.table is None:
            self.unreadable[module] = reading.reason
        return reading.table


def _table(owner: SourceTree, module: str, tree: ast.Module) -> ModuleTable:
    """The names of a module of this syntax."""
    source = owner.files[owner.modules[module]]
    scope = Scope(module, owner.package_of(module), "module", walrus=b":=" in source)
    collect(tree.body, scope)
    # Few modules have a `global`; walking every function of the others took time for nothing.
    if _GLOBAL.search(source):
        for statement in every_statement(tree.body):
            if isinstance(statement, FunctionNode):
                _add_globals(statement, scope)
    return ModuleTable(
        name=module,
        scope=scope,
        # A module's own __getattr__ (PEP 562) may answer for any name.
        dynamic="__getattr__" in scope.bindings or any(mark in source for mark in _SELF_MADE),
        searches_elsewhere=b"__path__" in source,
        exported=_exported(scope),
    )


def patches_of(table: ModuleTable, tree: ast.Module) -> Patches:
    """What a module of this syntax does to others."""
    scope = Scope(table.scope.module, table.scope.package, "function", table.scope)
    # Copied: what functions import becomes no name of the module.
    scope.bindings.update({name: list(values) for name, values in table.scope.bindings.items()})
    patches: list[AttributePatch] = []
    replaced: set[str] = set()
    for statement in every_statement(tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            collect([statement], scope)
        else:
            patches.extend(_patches(statement))
            replaced.update(_replaced(statement))
    return Patches(patches=tuple(patches), scope=scope, replaced=frozenset(replaced))


def parse(source: bytes) -> ast.Module:
    """The syntax tree of a source.

    Raises:
        SyntaxError: it is not Python, or a newer one than this.
        ValueError: it holds null bytes.
        RecursionError: it nests too deeply.
    """
    with warnings.catch_warnings():
        # Invalid escapes in other people's strings are not our business.
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _add_globals(node: FunctionNode, module: Scope) -> None:
    """What a function assigns to names it declares ``global`` are values of the module's names."""
    declared = {
        name for statement in own_statements(node.body) if isinstance(statement, ast.Global) for name in statement.names
    }
    if not declared:
        return
    inside = function_scope(node, module)
    for name in sorted(declared):
        for value in inside.bindings.get(name, ()):
            module.add(name, value)


def _patches(statement: ast.stmt) -> Iterator[AttributePatch]:
    match statement:
        case ast.Assign(targets=targets):
            for target in targets:
                for node in () if isinstance(target, ast.Name) else walk(target):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        yield AttributePatch(node.value, node.attr)
        case ast.AugAssign(target=ast.Attribute() as target) | ast.AnnAssign(target=ast.Attribute() as target):
            yield AttributePatch(target.value, target.attr)
        case ast.Expr(value=ast.Call(func=ast.Name(id="setattr"), args=[target, name, _])):
            constant = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
            yield AttributePatch(target, constant)


def _replaced(statement: ast.stmt) -> Iterator[str]:
    """``sys.modules["name"] = ...``."""
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        match target:
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=str(name))):
                yield name


def _exported(scope: Scope) -> frozenset[str] | None:
    names: set[str] = set()
    for value in scope.bindings.get("__all__", ()):
        match value:
            case Assigned(value=ast.List(elts=elements) | ast.Tuple(elts=elements)):
                constants = [element.value for element in elements if isinstance(element, ast.Constant)]
                # A computed element: `__all__` may hold any name.
                if len(constants) != len(elements):
                    return None
                names.update(str(constant) for constant in constants)
            case _:
                return None
    return frozenset(names) if "__all__" in scope.bindings else None
