"""Signatures read from syntax, and whether a call fits one."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature

from envbuild.drift.findings import FindingKind

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call, as far as they can be read.

    Attributes:
        positional: how many are certainly given by position.
        complete: whether nothing else can arrive, so that what is not here is left out.
    """

    positional: int
    keywords: tuple[str, ...]
    complete: bool = True

    def then(self, other: CallArguments) -> CallArguments:
        """What a partial with these arguments passes on when it is called with the others."""
        own = tuple(name for name in self.keywords if name not in other.keywords)
        return CallArguments(self.positional + other.positional, own + other.keywords, self.complete and other.complete)


@dataclass(frozen=True)
class Misfit:
    """Why a call does not fit."""

    kind: FindingKind
    detail: str


def arguments_of(call: ast.Call, skip: int = 0) -> CallArguments:
    """The arguments of a call, without the first ``skip`` positional ones."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    named = tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    return CallArguments(
        positional=max(0, sum(not isinstance(argument, ast.Starred) for argument in call.args) - skip),
        keywords=named,
        complete=not starred and len(named) == len(call.keywords),
    )


def signature_of(arguments: ast.arguments) -> Signature:
    """The signature of a ``def``."""
    by_position = [
        *((argument.arg, Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument.arg, Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    # ast has the defaults of the last ones alone.
    first_default = len(by_position) - len(arguments.defaults)
    parameters = [parameter(name, kind, optional=i >= first_default) for i, (name, kind) in enumerate(by_position)]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(parameter(argument.arg, Parameter.KEYWORD_ONLY, optional=default is not None))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return signature(parameters)


def parameter(name: str, kind: object, *, optional: bool) -> Parameter:
    """A parameter; what its default is does not matter, only whether there is one."""
    # inspect's parameter kinds have no public type.
    return Parameter(name, kind, default=None if optional else Parameter.empty)  # type: ignore[arg-type]


def signature(parameters: Iterable[Parameter]) -> Signature:
    """A signature as it stands: an order that Python would refuse is not for this check to judge."""
    # The argument is inspect's own and not documented; without it an order that Python refuses is a ValueError.
    return Signature(list(parameters), __validate_parameters__=False)


def without_first(whole: Signature) -> Signature:
    """The signature of a bound method: without ``self`` or ``cls``, unless ``*args`` takes it."""
    parameters = list(whole.parameters.values())
    return signature(parameters[1:] if parameters and parameters[0].kind in _BY_POSITION else parameters)


def misfits(whole: Signature, given: CallArguments, optional: frozenset[str] = frozenset()) -> tuple[Misfit, ...]:
    """Everything about a call that the signature refuses; empty when it fits or might fit.

    Args:
        optional: parameters whose absence is not to be reported.
    """
    entries = list(whole.parameters.values())
    kinds = {entry.kind for entry in entries}
    # An order of kinds as in inspect.signature; the call is bound by hand, as Signature.bind stops at its first error.
    by_position = [entry for entry in entries if entry.kind in _BY_POSITION]
    by_keyword = {entry.name for entry in entries if entry.kind in _BY_KEYWORD}
    refusals: list[Misfit] = []
    unknown = [name for name in given.keywords if name not in by_keyword]
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        refusals.append(Misfit(FindingKind.UNEXPECTED_KEYWORD, f"takes no keyword {_quoted(unknown)}"))
    if given.positional > len(by_position) and Parameter.VAR_POSITIONAL not in kinds:
        most = len(by_position)
        refusals.append(
            Misfit(
                FindingKind.TOO_MANY_ARGUMENTS, f"takes at most {most} positional arguments; {given.positional} given"
            )
        )
    # A keyword with a positional-only parameter's name goes into **kwargs.
    filled = [entry.name for entry in by_position[: given.positional] if entry.kind is not Parameter.POSITIONAL_ONLY]
    if twice := [name for name in filled if name in given.keywords]:
        refusals.append(
            Misfit(FindingKind.TOO_MANY_ARGUMENTS, f"gets {_quoted(twice)} twice: by position and by keyword")
        )
    # `*args` and `**kwargs` in a call may bring what seems to be missing.
    if given.complete:
        open_entries = [*by_position[given.positional :], *(e for e in entries if e.kind is Parameter.KEYWORD_ONLY)]
        named = by_keyword.intersection(given.keywords)
        absent = [
            entry.name
            for entry in open_entries
            if entry.default is Parameter.empty and entry.name not in named | optional
        ]
        if absent:
            refusals.append(Misfit(FindingKind.MISSING_ARGUMENT, f"requires {_quoted(absent)}"))
    return tuple(refusals)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
