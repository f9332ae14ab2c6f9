"""A project's pyproject.toml as frozen types, as far as a lock needs it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envbuild.core import tomlread
from envbuild.core.validation import describe_errors


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=lambda name: name.replace("_", "-"))


class Index(_Table):
    """A ``[[tool.uv.index]]``."""

    name: str = ""
    url: str
    default: bool = False


class StaticMetadata(_Table):
    """A ``[[tool.uv.dependency-metadata]]``."""

    name: str
    version: str = ""
    requires_dist: tuple[str, ...] = ()
    requires_python: str = ""
    provides_extra: tuple[str, ...] = ()


class UvTable(_Table):
    """``[tool.uv]``."""

    no_build_isolation_package: tuple[str, ...] = ()
    build_constraint_dependencies: tuple[str, ...] = ()
    index: tuple[Index, ...] = ()
    dependency_metadata: tuple[StaticMetadata, ...] = ()


class _Tool(_Table):
    uv: UvTable = UvTable()


class _Project(_Table):
    name: str = ""


class Pyproject(_Table):
    """A pyproject.toml."""

    project: _Project = _Project()
    tool: _Tool = Field(default_factory=_Tool)


def parse_pyproject(text: str) -> Pyproject:
    """The content of a pyproject.toml.

    Raises:
        ValueError: it is not TOML, or a key is of another type; says which.
    """
    try:
        return Pyproject.model_validate(tomlread.loads(text))
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error
