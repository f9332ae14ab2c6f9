"""A matrix: the certification cases of a stack, how they train, and how closely they must agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from envbuild.catalog.fields import Device, Name, TomlModel
from envbuild.catalog.model_spec import ModelSpec
from envbuild.catalog.tables import TableOf, hints_of, without_none
from envbuild_smoke.plan.axes import TABLE, Axis, CaseAxes, Layout, Precision, Settings, Training, axes

T = TypeVar("T")

# The tokens of text: a byte each, and with Megatron-Bridge one that ends a document.
TEXT_TOKENS = 257

# Healthy layouts of a GPT on two H200 (bf16) stayed within 1e-3 of the baseline's loss and 0.3 % of its gradient norm.
# A wrong gradient scale doubled the norm while the loss fell, so a matrix may not allow much more than that.
LossBound = Annotated[float, Field(ge=0, le=0.01)]
GradNormBound = Annotated[float, Field(ge=0, le=0.02)]
WeightsBound = Annotated[float, Field(ge=0, le=0.1)]


class Band(TomlModel):
    """How far a case's numbers may be from the baseline's at most, relative to them, whatever bands were measured."""

    loss_relative: LossBound
    grad_norm_relative: GradNormBound
    weights_relative: WeightsBound = Field(description="for each tensor of the final weights, where they are compared")


class RecipeAs(str, Enum):
    """A framework's recipe as people write it, or with the flags that cure what it is known to train wrongly."""

    PLAIN = "plain"
    CURED = "cured"


def _tag(value: object) -> str:
    # A union that is chosen by form: pydantic would else report the errors of both kinds of value for one mistake.
    return "[many]" if isinstance(value, (list, tuple)) else "[one]"


# A value, or a list of values: a case for each.
OneOrMore = Annotated[
    Annotated[T, Tag("[one]")] | Annotated[tuple[T, ...], Field(min_length=1), Tag("[many]")],
    Discriminator(_tag),
]


OWN_BASELINE = "in the place of the matrix's; such cases have a baseline of their own"


def _names(table: Iterable[Axis]) -> list[str]:
    return [axis.name for axis in table]


def _row_fields() -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The model and the axes as fields of a row."""
    one_or_more: Any = OneOrMore
    yield "model", (one_or_more[Name], ...)
    types = {name: hint for kind in (Layout, Training, Settings, CaseAxes) for name, hint in hints_of(kind).items()}
    for axis in TABLE:
        # Without it, a value of training is the matrix's, and a derived one that of the layout.
        default = None if axis in axes(Training) or axis.derived else axis.default
        text = f"{axis.text}; {OWN_BASELINE}" if axis.own_baseline else axis.text
        kind = one_or_more[without_none(types[axis.name])]
        yield axis.name, (kind | None if default is None else kind, Field(default=default, description=text))


_FIELDS: dict[str, Any] = dict(_row_fields())
_AxesOfRow: Any = create_model("_AxesOfRow", __base__=TomlModel, **_FIELDS)


class MatrixRow(_AxesOfRow):  # type: ignore[misc]
    """One row of a matrix: a case, or with lists of values one for each combination of them.

    What it does not name is as in the baseline.
    """

    recipe: OneOrMore[RecipeAs] = Field(
        default=RecipeAs.CURED,
        description="plain: the framework's recipe without the flags that cure what it is known to train wrongly",
    )
    compare_weights: bool = Field(default=False, description="compare the final weights with the baseline's too")
    devices: tuple[Device, ...] | None = Field(
        default=None, min_length=1, description="left out on other devices; without it, all of the matrix's"
    )
    where_possible: bool = Field(
        default=False, description="left out, not refused, where the GPU or the environment's packages cannot do it"
    )

    def specs(self) -> Iterator[dict[str, object]]:
        """The values that the row names, by axis: a case for each combination."""
        order = (*_names(axes(Layout)), "model", *_names(TABLE), "recipe", "compare_weights")
        named = self.model_fields_set
        given = [name for name in dict.fromkeys(order) if name in named and getattr(self, name) is not None]
        values = [value if isinstance(value := getattr(self, name), tuple) else (value,) for name in given]
        for chosen in itertools.product(*values):
            yield dict(zip(given, chosen, strict=True))


class BandwidthSweep(TomlModel):
    """Sweeps of all_reduce, all_gather and all_to_all after the cases."""

    # The sweep sends float32: 4 bytes are one element.
    sizes_bytes: tuple[Annotated[int, Field(ge=4, le=2**40)], ...] = Field(min_length=1)
    floor_gigabytes_per_second: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="of all_reduce and all_gather on a node, bus bandwidth of the best size; default: none",
    )
    devices: tuple[Device, ...] = Field(default=(Device.CUDA,), min_length=1)


class Matrix(TomlModel):
    """The certification cases of a stack (``envs/matrices/*.toml``)."""

    summary: str
    devices: tuple[Device, ...] = Field(min_length=1, description="the devices these cases can run on")
    time_limit_seconds: Annotated[int, Field(gt=0, le=604_800, description="for each case, and each part of one")]
    models: dict[Name, ModelSpec] = Field(min_length=1)
    training: Annotated[Training, TableOf()]
    tolerance: dict[Precision, Band]
    bandwidth: BandwidthSweep | None = None
    cases: tuple[MatrixRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _models_fit_their_kind(self) -> Matrix:
        for name, model in self.models.items():
            if (model.kind == "mamba-hybrid") != (model.mamba is not None):
                raise ValueError(f"models.{name}: kind mamba-hybrid needs a table mamba, and no other kind has one")
            if model.mamba is not None and model.moe is not None:
                raise ValueError(f"models.{name}: a model of kind mamba-hybrid has no moe here")
            if model.dataset == "text" and model.recipe is not None and model.vocabulary_size < TEXT_TOKENS:
                needs = f"vocabulary_size of {TEXT_TOKENS} or more (bytes, and the end of a document)"
                raise ValueError(f"models.{name}: dataset text needs {needs}")
        return self
