"""Classes: the order of their bases, what their constructors take, and which method a name means."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from inspect import Parameter, Signature

from envbuild.drift.bindings import ClassDefinition, FieldDefinition, FunctionDefinition, Scope
from envbuild.drift.decorators import HARMLESS, Decorating
from envbuild.drift.signatures import parameter, signature, without_first
from envbuild.drift.symbols import (
    UNKNOWN,
    ClassSymbol,
    ExternalSymbol,
    FunctionSymbol,
    MemberSymbol,
    Reader,
    Symbol,
    UnknownSymbol,
    full_name,
)

# Bases of other packages that bring no constructor arguments, fields or methods of interest.
_PLAIN = frozenset({"builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol", "typing_extensions.Protocol"})
# Not pydantic's: those of it ignore keywords they do not know.
_DATACLASSES = frozenset({"dataclasses.dataclass"})
# Of an enumeration whose bases are these, the class body shows every member.
_ENUMERATIONS = frozenset({"enum.Enum", "enum.IntEnum", "enum.Flag", "enum.IntFlag", "enum.StrEnum"})
_FIELD = "dataclasses.field"

Base = ClassDefinition | ExternalSymbol | UnknownSymbol


@dataclass(frozen=True)
class Callable:
    """Something that can be called: its signature without ``self`` where that is given.

    Attributes:
        name: dotted name of what has the signature.
        provided: whether the provider has a part in the signature.
        foreign: parameters that are not the provider's: fields that a subclass in the consumer adds.
    """

    signature: Signature
    name: str
    provided: bool
    foreign: frozenset[str] = frozenset()


class Classes:
    """Answers about the classes and functions of a :class:`Reader`."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._orders: dict[ClassDefinition, tuple[Base, ...]] = {}
        self._made: dict[ClassDefinition, tuple[Callable, ...]] = {}

    def callables(self, symbol: Symbol) -> tuple[Callable, ...]:
        """The signatures a symbol may have when called; empty when that is not certain."""
        match symbol:
            case FunctionSymbol(definition=definition):
                return self._functions([definition], bound=False)
            case ClassSymbol(definition=definition):
                return self._constructors(definition)
            case MemberSymbol(definition=definition, name=name, through_super=through_super):
                return self._members(definition, name, through_super=through_super)
        return ()

    def order(self, definition: ClassDefinition) -> tuple[Base, ...]:
        """The class and its bases in the order in which Python looks names up; what is unknown stands as such."""
        if definition not in self._orders:
            # A class that is its own base through an alias ends here.
            self._orders[definition] = (definition, UNKNOWN)
            bases = [self._base(base, definition.scope) for base in definition.bases]
            lines: list[list[Base]] = [
                list(self.order(base)) if isinstance(base, ClassDefinition) else [base] for base in bases
            ]
            # C3, as in "The Python 2.3 Method Resolution Order": the bases' own orders, then the bases as written.
            merged = _merge([*lines, bases])
            self._orders[definition] = (definition, UNKNOWN) if merged is None else (definition, *merged)
        return self._orders[definition]

    def _base(self, node: ast.expr, scope: Scope) -> Base:
        # `Generic[T]` and `Base[int]` have the order of the class before the brackets.
        symbols = self.reader.evaluate(node.value if isinstance(node, ast.Subscript) else node, scope)
        match symbols:
            case (ClassSymbol(definition=definition),):
                return definition
            case (ExternalSymbol() as external,):
                return external
        return UNKNOWN

    def lacks_member(self, definition: ClassDefinition, name: str) -> bool:
        """Whether a class is an enumeration of the provider without such a member; other classes may have anything."""
        order = self.order(definition)
        bodies = [base.body for base in order if isinstance(base, ClassDefinition)]
        others = {base.name for base in order if isinstance(base, ExternalSymbol)} - {"builtins.str", "builtins.int"}
        return (
            len(bodies) + len([base for base in order if isinstance(base, ExternalSymbol)]) == len(order)
            and bool(others & _ENUMERATIONS)
            and others <= _ENUMERATIONS | _PLAIN
            and self._is_provided(definition)
            and not definition.decorators
            and definition.metaclass is None
            and not self._is_patched(definition, name)
            and not any(name in body.bindings for body in bodies)
            # What an enumeration has from enum, int and str: name, value, from_bytes, upper.
            and not hasattr(enum.IntFlag, name)
            and not hasattr(str, name)
        )

    # Constructors

    def _constructors(self, definition: ClassDefinition) -> tuple[Callable, ...]:
        if definition not in self._made:
            order = self.order(definition)
            ordinary = all(self._is_ordinary(base) for base in order)
            self._made[definition] = self._initializers(order, full_name(definition)) if ordinary else ()
        return self._made[definition]

    def _is_ordinary(self, base: Base) -> bool:
        """Whether calling a class with this base does no more than run ``__init__``."""
        if not isinstance(base, ClassDefinition):
            # `Kind(1)` looks up a member; it makes no object.
            return not (isinstance(base, ExternalSymbol) and base.name.partition(".")[0] == "enum")
        if self._is_patched(base, "__new__", "__init__"):
            return False
        # A metaclass may have a `__call__` of its own; abc's has none.
        if base.metaclass is not None and not self.reader.is_one_of({"abc.ABCMeta"}, base.metaclass, base.scope):
            return False
        # A `__new__` that takes what it likes may leave out or change what `__init__` gets.
        makers = base.body.bindings.get("__new__", [])
        return all(isinstance(maker, FunctionDefinition) and maker.builds_own_class for maker in makers)

    def _initializers(self, order: Iterable[Base], name: str) -> tuple[Callable, ...]:
        """What the first ``__init__`` of the classes in this order takes."""
        provided = False
        for base in order:
            if isinstance(base, ExternalSymbol) and base.name in _PLAIN:
                continue
            if not isinstance(base, ClassDefinition):
                return ()
            provided = provided or self._is_provided(base)
            # A decorator may replace the class; dataclass is one of those known not to.
            if not all(self._is_harmless(decorator, base.scope) for decorator in base.decorators):
                return ()
            if own := base.body.bindings.get("__init__"):
                functions = self._functions(own, bound=True)
                return tuple(replace(entry, name=full_name(base)) for entry in functions)
            if self._dataclass_options(base).get("init", False):
                return self._generated(base)
        # object.__init__ takes nothing.
        return (Callable(Signature(), name, provided),)

    def _functions(self, values: Iterable[object], *, bound: bool) -> tuple[Callable, ...]:
        """The signatures of definitions; empty as soon as one is not certain."""
        functions = []
        for value in values:
            # One definition that cannot be read may be the one that is called.
            if not isinstance(value, FunctionDefinition) or (form := self._form(value)) == "unknown":
                return ()
            # A classmethod is bound on a class as well; a plain function only on an object.
            drops_first = form == "class" or (form == "plain" and bound)
            own = without_first(value.signature) if drops_first else value.signature
            functions.append(Callable(own, full_name(value), self.reader.tables.provided(value.scope.module)))
        return tuple(functions)

    def _members(self, definition: ClassDefinition, name: str, *, through_super: bool) -> tuple[Callable, ...]:
        order = self.order(definition)[1 if through_super else 0 :]
        if name == "__init__":
            if any(isinstance(base, ClassDefinition) and self._is_patched(base, name) for base in order):
                return ()
            members = self._initializers(order, full_name(definition))
            # `Base.__init__(self, ...)` is called with self.
            return members if through_super else tuple(_with_self(entry) for entry in members)
        for base in order:
            if isinstance(base, ExternalSymbol) and base.name in _PLAIN:
                continue
            if not isinstance(base, ClassDefinition) or self._is_patched(base, name):
                return ()
            if own := base.body.bindings.get(name):
                return self._functions(own, bound=through_super)
        return ()

    # Decorators

    def _form(self, definition: FunctionDefinition) -> str:
        """``plain``, ``static`` or ``class``; ``unknown`` when a decorator may change how it is called."""
        form = "plain"
        for decorator in definition.decorators:
            if self.reader.is_one_of({"builtins.staticmethod"}, decorator, definition.scope):
                form = "static"
            elif self.reader.is_one_of({"builtins.classmethod"}, decorator, definition.scope):
                form = "class"
            elif not self._is_harmless(decorator, definition.scope):
                return "unknown"
        return form

    def _is_harmless(self, decorator: ast.expr, scope: Scope) -> bool:
        called = isinstance(decorator, ast.Call)
        wanted = Decorating.FACTORY if called else Decorating.HARMLESS
        symbols = self.reader.evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator, scope)
        return bool(symbols) and all(
            symbol.name in HARMLESS
            if isinstance(symbol, ExternalSymbol)
            else isinstance(symbol, FunctionSymbol) and symbol.definition.decorating is wanted
            for symbol in symbols
        )

    # Dataclasses

    def _dataclass_options(self, definition: ClassDefinition) -> dict[str, bool]:
        """The options of ``@dataclass``, with ``init``; empty when the class is not a dataclass."""
        for decorator in definition.decorators:
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self.reader.is_one_of(_DATACLASSES, function, definition.scope):
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                return {"init": True, **_constants(keywords)}
        return {}

    def _generated(self, definition: ClassDefinition) -> tuple[Callable, ...]:
        """The constructor that ``@dataclass`` writes, from the fields of the class and its bases."""
        fields: dict[str, Parameter | None] = {}
        foreign: set[str] = set()
        provided = False
        # From the last base on: a field keeps its first place, with its last definition (dataclasses, "Inheritance").
        for base in reversed(self.order(definition)):
            if isinstance(base, ExternalSymbol) and base.name in _PLAIN:
                continue
            if not isinstance(base, ClassDefinition):
                return ()
            if options := self._dataclass_options(base):
                provided = provided or self._is_provided(base)
                for entry in base.fields:
                    if not _is_class_variable(entry.annotation):
                        fields[entry.name] = self._field(entry, base.body, options)
                        (foreign.discard if self._is_provided(base) else foreign.add)(entry.name)
        whole = signature(entry for entry in fields.values() if entry is not None)
        return (Callable(whole, full_name(definition), provided, frozenset(foreign)),)

    def _field(self, entry: FieldDefinition, scope: Scope, options: dict[str, bool]) -> Parameter | None:
        """The parameter of a field; None for one that the constructor does not take."""
        own: dict[str, bool] = {}
        optional = entry.value is not None
        if isinstance(entry.value, ast.Call) and self.reader.is_one_of({_FIELD}, entry.value.func, scope):
            own = _constants(entry.value.keywords)
            # None stands for `**options`, which may hold a default.
            optional = any(keyword.arg in {"default", "default_factory", None} for keyword in entry.value.keywords)
        if not own.get("init", True):
            return None
        keyword_only = own.get("kw_only", options.get("kw_only", False) or entry.after_marker)
        kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
        return parameter(entry.name, kind, optional=optional)

    def _is_provided(self, definition: ClassDefinition) -> bool:
        return self.reader.tables.provided(definition.scope.module)

    def _is_patched(self, definition: ClassDefinition, *names: str) -> bool:
        key = full_name(definition)
        return any((key, name) in self.reader.patched for name in (*names, None))


def _with_self(entry: Callable) -> Callable:
    first = parameter("self", Parameter.POSITIONAL_ONLY, optional=False)
    return replace(entry, signature=signature([first, *entry.signature.parameters.values()]))


def _constants(keywords: Iterable[ast.keyword]) -> dict[str, bool]:
    return {
        keyword.arg: bool(keyword.value.value)
        for keyword in keywords
        if keyword.arg is not None and isinstance(keyword.value, ast.Constant)
    }


def _is_class_variable(annotation: ast.expr) -> bool:
    # A quoted annotation, "ClassVar[int]": no field either (dataclasses, "Class variables").
    if isinstance(annotation, ast.Constant):
        return str(annotation.value).rpartition("typing.")[2].startswith("ClassVar")
    node = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return getattr(node, "attr", getattr(node, "id", "")) == "ClassVar"


def _merge(lines: list[list[Base]]) -> list[Base] | None:
    """The C3 merge; None when the order of the bases contradicts itself."""
    merged: list[Base] = []
    rest = [list(line) for line in lines if line]
    while rest:
        head = next(_heads(rest), None)
        if head is None:
            return None
        merged.append(head)
        rest = [line[1:] if line[0] == head else line for line in rest]
        rest = [line for line in rest if line]
    return merged


def _heads(lines: list[list[Base]]) -> Iterator[Base]:
    for line in lines:
        if not any(line[0] in other[1:] for other in lines):
            yield line[0]
