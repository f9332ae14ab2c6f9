"""Tables of TOML whose keys are the fields of a frozen dataclass: the runner's own, declared once for both sides."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, SerializationInfo, create_model
from pydantic_core import CoreSchema, core_schema

from envbuild.catalog.fields import TomlModel


class TableOf:
    """Annotates a dataclass: it is read from a table that has no other keys, each within its bounds."""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        hints = hints_of(source)
        own: dict[str, Any] = {
            each.name: (hints[each.name], ... if each.default is MISSING else each.default) for each in fields(source)
        }
        table = create_model(source.__name__, __base__=TomlModel, __doc__=source.__doc__, **own)

        def as_json(value: Any, info: SerializationInfo) -> dict[str, object]:
            named = [name for name in own if not info.exclude_defaults or getattr(value, name) != own[name][1]]
            return {name: getattr(value, name) for name in named}

        return core_schema.no_info_after_validator_function(
            lambda read: source(**dict(read)),
            core_schema.no_info_before_validator_function(
                lambda value: vars(value) if isinstance(value, source) else value, handler.generate_schema(table)
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(as_json, info_arg=True),
        )


def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields as pydantic reads them."""
    return {name: _hint(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def without_none(hint: Any) -> Any:
    """A type without None, which TOML does not have."""
    (wanted,) = [argument for argument in get_args(hint) if argument is not NoneType] if _is_union(hint) else [hint]
    return wanted


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _hint(hint: Any) -> Any:
    if _is_union(hint):
        return _hint(without_none(hint)) | None
    if is_dataclass(hint):
        return Annotated[hint, TableOf()]
    if get_origin(hint) is Annotated:
        kind, rule = get_args(hint)
        return Annotated[kind, Field(**rule.bounds)]
    return hint
