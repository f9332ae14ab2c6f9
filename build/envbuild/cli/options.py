"""Options of commands, each declared once: as a field of a frozen dataclass, from which click's option is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

from envbuild.core.errors import UsageError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# In a field's metadata: adds its option to a function, given the field's name; the dataclass of an included field.
_DECORATOR, _INCLUDED = "decorator", "included"


class _Converted(click.ParamType):  # type: ignore[type-arg]
    """A click type from a function that converts a word, or raises ValueError with the reason."""

    name = "text"

    def __init__(self, convert: Callable[[str], object]) -> None:
        self._convert = convert

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> object:
        try:
            return self._convert(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def option(usage: str, text: str, *, convert: Callable[[str], object] | None = None, **attributes: Any) -> Any:
    """A field for an option.

    Args:
        usage: its flags and the name of its value: ``--base NAME``.
        text: its help.
        convert: makes the value from the word that was given, or raises ValueError.
        attributes: of :class:`click.Option`.
    """
    words = usage.split()
    flags = [word for word in words if word.startswith("-")]
    if flags != words:
        attributes["metavar"] = words[-1]
    if convert is not None:
        attributes["type"] = _Converted(convert)
    attributes |= {"help": text, "show_default": bool(attributes.get("default"))}
    return dataclasses.field(metadata={_DECORATOR: lambda name: click.option(*flags, name, **attributes)})


def flag(usage: str, text: str) -> Any:
    """A field that is True where the option was given."""
    return option(usage, text, is_flag=True)


def argument(**attributes: Any) -> Any:
    """A field for a word without an option; ``attributes`` are those of :class:`click.Argument`."""
    return dataclasses.field(metadata={_DECORATOR: lambda name: click.argument(name, **attributes)})


def include(kind: type[T]) -> T:
    """A field for the options of another dataclass, which several commands have."""
    made: Any = dataclasses.field(metadata={_DECORATOR: lambda _: add_options(kind), _INCLUDED: kind})
    return made  # type: ignore[no-any-return]


def parse_list(text: str) -> tuple[str, ...]:
    """``h100,h200`` as a tuple, each name once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def no_effect(flags: str, condition: str, why: str, instead: str = "") -> UsageError:
    """The error for an option that does nothing under a condition; ``instead``: what else the user may want."""
    fix = f"{instead}, or leave {flags} out." if instead else f"Leave {flags} out."
    return UsageError(f"{flags} has no effect {condition}", why=why, fix=fix)


def add_options(kind: type) -> Callable[[F], F]:
    """A decorator that adds the options of a dataclass, in the order of its fields."""

    def decorate(function: F) -> F:
        # Decorators apply from the last to the first, and click lists options in the order of the source.
        for field in reversed(dataclasses.fields(kind)):
            function = field.metadata[_DECORATOR](field.name)(function)
        return function

    return decorate


def collect(kind: type[T], values: dict[str, Any]) -> T:
    """The dataclass with what click read; its values are taken out of ``values``."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(
        **{
            field.name: collect(field.metadata[_INCLUDED], values)
            if _INCLUDED in field.metadata
            else values.pop(field.name)
            for field in fields
        }
    )
