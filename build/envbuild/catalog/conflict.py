"""What versions are known not to do together, or to train wrongly (``envs/conflicts/*.toml``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

from packaging.specifiers import SpecifierSet
from pydantic import Field, StringConstraints, model_validator

from envbuild.catalog.fields import Name, PackageName, Specifier, TomlModel
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.model_spec import ModelSpec
from envbuild_smoke.plan.architecture import Architecture, Latent, Moe
from envbuild_smoke.plan.axes import TABLE, CaseAxes, Layout, Training, axes

# A value, or that a number is there and larger or smaller: ">1", "<1e-5".
_PATTERN = r"^([<>]\d+(\.\d+)?(e-?\d+)?|[A-Za-z][A-Za-z0-9_-]*)$"
Condition = bool | int | Annotated[str, StringConstraints(pattern=_PATTERN)]
# Left out: tables, of which moe's fields count by themselves. The layout that a case continues in is tried as one of
# its own (certify/cases/known_wrong.py), whatever its nodes.
_CONTINUED = {"continue_in", "continue_nodes"}
_OF_CASES = {*(axis.name for axis in TABLE), *(field.name for field in fields(Training))} - _CONTINUED
_OF_MODELS = {
    *(set(ModelSpec.model_fields) - {"moe", "mamba", "mla", "architecture"}),
    *(each.name for kind in (Architecture, Latent, Moe) for each in fields(kind)),
}
FIELDS = tuple(sorted(_OF_CASES | _OF_MODELS))


class ShownBy(TomlModel):
    """A case that fails where the entry is right."""

    matrix: Name
    case: str


class Conflict(TomlModel):
    """Versions that resolve and install together and do not work, or train some cases wrongly without an error.

    The file's name is the code under which `envbuild lock` refuses the former, and warns of the latter.
    """

    summary: str = Field(description="what goes wrong")
    packages: dict[PackageName, Specifier] = Field(min_length=1, description="the versions, as specifiers")
    evidence: str = Field(min_length=1, description="how it is known")
    fix: str
    fixed_in: str | None = Field(default=None, description="the first release that is known to have the fix")
    cases: tuple[dict[str, Condition], ...] = Field(
        default=(),
        description="what trains wrongly: fields of a case, its model and its experts, each with its value, or "
        '">1" or "<1e-5" for others; a case has all of one table',
    )
    shown_by: ShownBy | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Conflict:
        if not self.cases:
            if len(self.packages) < 2 or self.shown_by or self.fixed_in:
                raise ValueError("without cases it names two packages or more, and has no fixed_in and no shown_by")
            return self
        if self.shown_by is None:
            raise ValueError("cases need shown_by, the case that fails")
        if unknown := sorted({name for table in self.cases for name in table} - set(FIELDS)):
            raise ValueError(f"cases: {unknown[0]} is not a field of cases or models; allowed: {', '.join(FIELDS)}")
        if not all(self.cases):
            raise ValueError("cases: a table without a field would be about every case")
        return self

    def is_about(self, versions: Mapping[str, str | None]) -> bool:
        """Whether every package that it names is there in such a version."""
        # prereleases=True: a specifier leaves them out by default (PEP 440), whatever is there.
        locked = {name: versions.get(name) for name in self.packages}
        return all(
            version is not None and SpecifierSet(self.packages[name]).contains(version, prereleases=True)
            for name, version in locked.items()
        )

    def affects(self, values: Mapping[str, object]) -> bool:
        """Whether a case with these values trains wrongly."""
        return any(
            all(_meets(condition, values.get(name)) for name, condition in table.items()) for table in self.cases
        )

    def setting(self) -> str:
        """What trains wrongly, for people: ``pipeline = 2, virtual_pipeline > 1``."""
        return "; or ".join(", ".join(_text(*setting) for setting in table.items()) for table in self.cases)


def _meets(condition: Condition, value: object) -> bool:
    if isinstance(condition, str) and condition[0] in "<>":
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        limit = float(condition[1:])
        return value > limit if condition[0] == ">" else value < limit
    # To Python True is 1.
    return type(value) is type(condition) and value == condition


def _text(name: str, condition: Condition) -> str:
    words = str(condition).lower() if isinstance(condition, bool) else str(condition)
    return f"{name} {words[0]} {words[1:]}" if words[0] in "<>" else f"{name} = {words}"


def known_wrong(conflicts: Mapping[str, Conflict], versions: Mapping[str, str | None]) -> dict[str, Conflict]:
    """The entries that are about cases that these versions train wrongly, by name."""
    return {name: conflict for name, conflict in conflicts.items() if conflict.cases and conflict.is_about(versions)}


def values_of(values: Mapping[str, object], training: Training, model: ModelSpec) -> dict[str, object]:
    """All values of a case that an entry can name; ``values`` are those of its layout and settings."""
    tables = [vars(table) for table in (model.architecture, model.mla, model.moe) if table is not None]
    own = {name: value for table in tables for name, value in table.items()}
    return {**dict(model), **own, **vars(training), **values}


def baselines(matrix: Matrix) -> Iterator[dict[str, object]]:
    """The values of the baselines of a matrix, on whatever device."""
    # Another micro batch size is a case's own.
    shared = {axis.name for axis in axes(Training) if axis.own_baseline}
    for spec in (spec for row in matrix.cases for spec in row.specs() if spec["model"] in matrix.models):
        own: dict[str, Any] = {name: value for name, value in spec.items() if name in shared}
        layout = {**vars(Layout()), "precision": spec.get("precision", CaseAxes().precision)}
        yield values_of(layout, replace(matrix.training, **own), matrix.models[str(spec["model"])])
