"""What the models of the TOML files are made of: names, specifiers, and a base class that refuses unknown keys."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, StringConstraints
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
# The normal form of PEP 503, so that names can be compared as they are.
PackageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
# Some extras are named for a CUDA: Transformer Engine's core-cu12 and core-cu13.
Extra = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]|\{cuda_major\})*$")]
# Python's names of the machines that a platform is.
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
DATE = r"^\d{4}-\d{2}-\d{2}$"
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


# What a JSON schema can say of version specifiers (PEP 440): it allows all of them, and little else.
_CLAUSE = r"((~=|===?|!=|<=?|>=?)\s*[vV]?[0-9][A-Za-z0-9.*+!_-]*|===\s*[^\s,;)]+)"
SPECIFIER_PATTERN = rf"^\s*{_CLAUSE}?(\s*,\s*{_CLAUSE}?)*\s*$"


class MisplacedError(ValueError):
    """A value that does not belong where it is, found by a validator of something around it.

    Args:
        location: the keys from that something to the value.
    """

    def __init__(self, location: tuple[int | str, ...], text: str) -> None:
        super().__init__(text)
        self.location = location


def _specifier(text: str) -> str:
    refusal = f"{text!r} is not a version specifier (such as '==2.13.0' or '>=1,<2')"
    try:
        clauses = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(refusal) from error
    # packaging takes a bare "===", which no version satisfies.
    if not all(clause.version for clause in clauses):
        raise ValueError(refusal)
    return text


class _SpecifierSchema:
    """Puts the pattern into JSON schemas; what is read is judged by packaging alone."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": SPECIFIER_PATTERN}


Specifier = Annotated[str, AfterValidator(_specifier), _SpecifierSchema()]


class TomlModel(BaseModel):
    """A frozen model that refuses unknown keys."""

    # TOML has inf and nan, with which no limit compares.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def complete_or_extending(schema: dict[str, Any]) -> None:
    """Put into a JSON schema that a file has the required keys, or takes them from another file, which it extends."""
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]


def part_of_extending(schema: dict[str, Any]) -> None:
    """Leave out of a JSON schema which keys a table must have: another file may have them."""
    schema.pop("required", None)


class Device(str, Enum):
    """Where tensors live."""

    CPU = "cpu"
    CUDA = "cuda"


VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

MOMENT_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def moment_of(text: str) -> datetime:
    """A moment as it is written here: ``2026-01-31T23:59:59Z``.

    Raises:
        ValueError: it is none.
    """
    return datetime.strptime(text, MOMENT_FORMAT).replace(tzinfo=timezone.utc)


def _moment(text: str) -> str:
    moment_of(text)
    return text


# Both checks are needed: strptime also takes 2026-1-1T1:1:1Z, which does not sort as text, and the pattern 2026-02-31.
Moment = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$"), AfterValidator(_moment)]
