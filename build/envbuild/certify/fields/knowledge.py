"""What recipes set, what converters take from a model's config, and what trials of single fields showed.

`envs/knowledge/recipes.toml` is written by `benchmarks/recipe_knowledge.py`, `envs/knowledge/fields.toml` by
`benchmarks/try_fields.py`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache

from packaging.version import Version
from pydantic import Field

from envbuild.catalog.fields import TomlModel
from envbuild.catalog.knowledge import load

# The sections of a recipe that are the library's configuration; the precision is written into model, ddp and optimizer.
SECTIONS = ("model", "optimizer", "scheduler", "ddp")
PRECISION = "mixed_precision"


class Converter(TomlModel):
    """What a converter of Megatron-Bridge sets for an architecture of Hugging Face.

    Attributes:
        fixed: fields with their value, as text.
        mapped: fields by the key of the config file that they are from, ``a.b`` for one in a table.
        computed: fields whose value it computes.
    """

    fixed: dict[str, str]
    mapped: dict[str, str]
    computed: tuple[str, ...]


class RecipeKnowledge(TomlModel):
    """The recipes of a release of Megatron-Bridge.

    Attributes:
        recipes: their names.
        from_hub: those whose model is a Hugging Face config's, by their places in ``recipes``: ``0-3 5``.
        fields: by field its values as text, each with the places of the recipes that set it.
        shared: what every converter takes from a config file, as ``Converter.mapped``.
        converters: by architecture.
    """

    summary: str
    release: str
    recipes: tuple[str, ...]
    from_hub: str
    fields: dict[str, dict[str, str]]
    shared: dict[str, str]
    converters: dict[str, Converter]

    def of_recipe(self, name: str) -> dict[str, str]:
        """The fields that a recipe sets, by name with its section, and their values.

        Raises:
            KeyError: there is no such recipe.
        """
        if name not in self.recipes:
            raise KeyError(name)
        place = self.recipes.index(name)
        return {
            field: value
            for field, by_value in self.fields.items()
            for value, places in by_value.items()
            if place in _numbers(places)
        }

    def takes_hub_config(self, name: str) -> bool:
        """Whether a recipe's model is a Hugging Face config's."""
        return self.recipes.index(name) in _numbers(self.from_hub)

    def values_of(self, field: str) -> Mapping[str, int]:
        """The values that recipes set a field to, each with their number."""
        return {value: len(_numbers(places)) for value, places in self.fields.get(field, {}).items()}

    def hub_fields(self) -> frozenset[str]:
        """All fields of a model that any converter sets."""
        names = {*self.shared}
        for converter in self.converters.values():
            names |= {*converter.fixed, *converter.mapped, *converter.computed}
        return frozenset(names)


def _numbers(text: str) -> frozenset[int]:
    """The numbers of ranges: ``0-3 5``."""
    ranges = (part.partition("-") for part in text.split())
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


class Trials(TomlModel):
    """What changing single fields in training alone did, with a release of megatron-core on the CPU.

    Attributes:
        caught: fields whose change failed a case, with the check that did.
        digits: fields whose change left every digit of every model that was tried.
    """

    caught: dict[str, str]
    digits: tuple[str, ...]


class FieldKnowledge(TomlModel):
    """Trials by release of megatron-core; fields that change no number anywhere, with the reason.

    Attributes:
        only_with: beginnings of fields that have an effect only with another field, ``NAME``, that is not at its
            default, or has a value, ``NAME=VALUE``.
    """

    summary: str
    evidence: str = Field(min_length=1)
    without_effect: dict[str, str]
    only_with: dict[str, str] = Field(default_factory=dict)
    trials: dict[str, Trials]

    def switch_of(self, field: str) -> tuple[str, str | None] | None:
        """The field that has to be set for this one to have an effect, and its value; None for any but its default."""
        for beginning, switch in self.only_with.items():
            if field.startswith(beginning):
                name, _, value = switch.partition("=")
                return name, value or None
        return None

    def trials_of(self, version: str) -> Trials:
        """The trials of the newest tried release up to a version, or of the oldest."""
        tried = sorted(self.trials, key=Version)
        return self.trials[
            max((release for release in tried if Version(release) <= Version(version)), default=tried[0], key=Version)
        ]


@cache
def recipes() -> RecipeKnowledge:
    """``recipes.toml``."""
    return load("recipes", RecipeKnowledge)


@cache
def tried_fields() -> FieldKnowledge:
    """``fields.toml``."""
    return load("fields", FieldKnowledge)


def library_field(recipe_field: str, known: Container[str]) -> str:
    """The name of a recipe's field in the library's configuration; empty where it is not one of the library's.

    Args:
        known: the library's fields.
    """
    section, _, name = recipe_field.partition(".")
    if section == PRECISION:
        return next((field for part in SECTIONS if (field := f"{part}.{name}") in known), "")
    return recipe_field if recipe_field in known else ""
