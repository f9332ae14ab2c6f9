"""Whether a function, used as a decorator, leaves the signature of what it decorates as it was."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum

from envbuild.drift.syntax import FunctionNode, own_statements, walk

# Decorators of other packages that leave the way a function is called alone. Anything not here is unknown. Those of
# classes are among them (dataclass, total_ordering): one that may replace its class hides the constructor.
HARMLESS = frozenset(
    {
        "abc.abstractmethod",
        "contextlib.asynccontextmanager",
        "contextlib.contextmanager",
        "dataclasses.dataclass",
        "functools.cache",
        "functools.lru_cache",
        "functools.total_ordering",
        "functools.wraps",
        "torch._dynamo.disable",
        "torch.compile",
        "torch.compiler.disable",
        "torch.enable_grad",
        "torch.inference_mode",
        "torch.jit.export",
        "torch.jit.ignore",
        "torch.jit.script",
        "torch.no_grad",
        "typing.final",
        "typing.no_type_check",
        "typing.overload",
        "typing.runtime_checkable",
        "typing_extensions.deprecated",
        "typing_extensions.final",
        "typing_extensions.override",
        "typing_extensions.runtime_checkable",
        "warnings.deprecated",
    }
)


class Decorating(Enum):
    """How a function of our own acts as a decorator."""

    UNKNOWN = "may change the signature"
    HARMLESS = "@f keeps the signature"
    FACTORY = "@f(...) keeps the signature"


def returns_name(node: FunctionNode) -> bool:
    """Whether it ends with ``return name``; nearly every function does not, and cannot be such a decorator."""
    last = node.body[-1]
    return isinstance(last, ast.Return) and isinstance(last.value, ast.Name)


def decorating(node: FunctionNode) -> Decorating:
    """Read from its body what a function that returns a name does to the functions it decorates."""
    if _keeps_signature(node):
        return Decorating.HARMLESS
    # A factory: @f(option) calls f, and what that returns decorates.
    inner = {function.name: function for function in _own_functions(node)}
    returned = list(_returned(node))
    if returned and all(isinstance(value, ast.Name) and value.id in inner for value in returned):
        kept = all(_keeps_signature(inner[value.id]) for value in returned if isinstance(value, ast.Name))
        return Decorating.FACTORY if kept else Decorating.UNKNOWN
    return Decorating.UNKNOWN


def builds_own_class(node: FunctionNode) -> bool:
    """Whether a ``__new__`` takes every argument and returns an object of its class, so that ``__init__`` decides."""
    # With fixed parameters it refuses calls itself, before `__init__` is asked.
    if node.name != "__new__" or node.args.vararg is None or node.args.kwarg is None or len(node.args.args) != 1:
        return False
    own = node.args.args[0].arg
    made = {
        target.id
        for statement in own_statements(node.body)
        if isinstance(statement, ast.Assign) and _is_new_of(statement.value, own)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    returned = list(_returned(node))
    return bool(returned) and all(
        _is_new_of(value, own) or (isinstance(value, ast.Name) and value.id in made) for value in returned
    )


def _is_new_of(value: ast.expr | None, own: str) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "__new__"
        and bool(value.args)
        and isinstance(value.args[0], ast.Name)
        and value.args[0].id == own
    )


def _keeps_signature(node: FunctionNode) -> bool:
    """Whether everything it returns is its first argument, or an inner function that passes all arguments on."""
    if not node.args.args:
        return False
    decorated = node.args.args[0].arg
    kept = {decorated, *(inner.name for inner in _own_functions(node) if _passes_on(inner, decorated))}
    returned = list(_returned(node))
    return bool(returned) and all(isinstance(value, ast.Name) and value.id in kept for value in returned)


def _passes_on(wrapper: FunctionNode, decorated: str) -> bool:
    """Whether ``def wrapper(*args, **kwargs)`` uses these for nothing but ``decorated(*args, **kwargs)``."""
    arguments = wrapper.args
    if arguments.posonlyargs or arguments.args or arguments.kwonlyargs:
        return False
    if arguments.vararg is None or arguments.kwarg is None:
        return False
    args, kwargs = arguments.vararg.arg, arguments.kwarg.arg
    calls = [
        node
        for node in walk(wrapper)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == decorated
    ]
    # Any other use, kwargs.pop("x") say, may change what is passed on.
    uses = [node for node in walk(wrapper) if isinstance(node, ast.Name) and node.id in {args, kwargs}]
    return bool(calls) and all(_is_forwarding(call, args, kwargs) for call in calls) and len(uses) == 2 * len(calls)


def _is_forwarding(call: ast.Call, args: str, kwargs: str) -> bool:
    match call:
        case ast.Call(
            args=[ast.Starred(value=ast.Name(id=positional))],
            keywords=[ast.keyword(arg=None, value=ast.Name(id=named))],
        ):
            return positional == args and named == kwargs
    return False


def _own_functions(node: FunctionNode) -> list[FunctionNode]:
    return [statement for statement in own_statements(node.body) if isinstance(statement, FunctionNode)]


def _returned(node: FunctionNode) -> Iterator[ast.expr | None]:
    for statement in own_statements(node.body):
        if isinstance(statement, ast.Return):
            yield statement.value
