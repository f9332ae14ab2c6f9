"""Compares what a recipe sets with what a certificate's cases account for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from envbuild.certify.fields.account import FieldAccount, is_number, same_value
from envbuild.certify.fields.knowledge import SECTIONS, Converter, FieldKnowledge, RecipeKnowledge, library_field
from envbuild.core import jsonread
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.files import machine_errors

State = Literal["covered", "size", "fixed", "without effect", "not covered", "unknown", "not the library's"]
# In the order in which they are shown: what to look at first.
STATES: tuple[State, ...] = (
    "not covered", "unknown", "not the library's", "size", "covered", "fixed", "without effect",
)  # fmt: skip
_MEANINGS: Mapping[State, str] = {
    "not covered": "no case has this value, or no case would notice another one",
    "unknown": "its value comes from the model's config: name that file (--hf-config), or the converter computes it",
    "not the library's": "Megatron-Bridge's own, or no field of the locked megatron-core's configuration",
    "size": "cases have other numbers",
    "covered": "cases have this value and another one, and a wrong value fails a case",
    "fixed": "all cases have this value",
    "without effect": "it changes no number",
}


@dataclass(frozen=True, kw_only=True)
class RecipeField:
    """A field that a recipe sets: its value, None where it is unknown, and the values that cases have."""

    name: str
    value: str | None
    state: State
    cases: tuple[str, ...] = ()

    def __str__(self) -> str:
        value = "?" if self.value is None else self.value
        return f"{self.name} = {value}" + (f" (cases: {', '.join(self.cases[:4])})" if self.cases else "")


@dataclass(frozen=True, kw_only=True)
class Against:
    """A recipe compared with the cases of a certificate."""

    recipe: str
    fields: tuple[RecipeField, ...]

    def in_state(self, state: State) -> list[RecipeField]:
        return [field for field in self.fields if field.state == state]

    def lines(self) -> list[str]:
        """As text: the fields of each state, those to look at first one a line."""
        lines = [f"{self.recipe}: {len(self.fields)} fields of the library's configuration"]
        for state in STATES:
            if fields := self.in_state(state):
                lines.append(f"{state}: {len(fields)} ({_MEANINGS[state]})")
                if state in ("not covered", "unknown", "not the library's"):
                    lines += [f"  {field}" for field in fields]
                else:
                    lines.append(f"  {', '.join(field.name for field in fields)}")
        return lines

    def as_json(self) -> list[Json]:
        return [{**asdict(field), "cases": list(field.cases)} for field in self.fields]


def against(
    account: FieldAccount,
    recipe: str,
    recipes: RecipeKnowledge,
    hub_config: Path | None,
    known: FieldKnowledge,
) -> Against:
    """What a recipe sets, field by field.

    Args:
        hub_config: the ``config.json`` of its model on a hub.

    Raises:
        UsageError: there is no such recipe, or it takes no such file.
        ConfigurationError: the file is none, or is of an architecture that Megatron-Bridge does not convert.
    """
    if recipe not in recipes.recipes:
        raise _unknown(recipe, recipes)
    takes = recipes.takes_hub_config(recipe)
    if hub_config is not None and not takes:
        raise UsageError(
            f"--hf-config has no effect with recipe {recipe}",
            why="It builds its model itself, and takes nothing from a Hugging Face config.",
            fix="Leave it out.",
        )
    # What the recipe sets itself lies over what the converter sets.
    values: dict[str, str | None] = dict(_of_hub(recipes, hub_config)) if takes else {}
    values.update(recipes.of_recipe(recipe))
    fields: dict[str, RecipeField] = {}
    for name, value in values.items():
        if library := library_field(name, account):
            fields[library] = _field(library, value, account)
        elif value is not None and name.partition(".")[0] in SECTIONS:
            fields[name] = RecipeField(name=name, value=value, state="not the library's")
    shown = (_switched_on(field, fields, known) for _, field in sorted(fields.items()))
    return Against(recipe=recipe, fields=tuple(shown))


def _switched_on(field: RecipeField, fields: Mapping[str, RecipeField], known: FieldKnowledge) -> RecipeField:
    """A field that has no effect in cases, where the recipe sets what would give it one."""
    switch = known.switch_of(field.name)
    needed = fields.get(switch[0]) if switch else None
    if field.state != "without effect" or switch is None or needed is None:
        return field
    if needed.value is None:
        return replace(field, state="unknown")
    # What cases have is off: otherwise the field would have an effect in them.
    is_set = all(not same_value(needed.value, other) for other in needed.cases)
    return replace(field, state="not covered") if (switch[1] is None and is_set) or needed.value == switch[1] else field


def _field(name: str, value: str | None, account: FieldAccount) -> RecipeField:
    cases = account.values_of(name)
    has_it = value is not None and any(same_value(value, other) for other in cases)
    state: State = "not covered"
    if name in account.without_effect:
        state = "without effect"
    elif value is None:
        state = "unknown"
    elif name in account.varied:
        numbers = is_number(value) and all(map(is_number, cases))
        state = "covered" if has_it else "size" if numbers else "not covered"
    elif has_it and len(cases) == 1:
        state = "fixed"
    return RecipeField(name=name, value=value, state=state, cases=cases)


def _of_hub(recipes: RecipeKnowledge, file: Path | None) -> Iterator[tuple[str, str | None]]:
    """What a converter sets; None where that is not known."""
    if file is None:
        # Whose converter it is, is in the file too.
        yield from ((name, None) for name in sorted(recipes.hub_fields()))
        return
    config = _read(file)
    converter = _converter(recipes, config, file)
    for name, keys in {**recipes.shared, **converter.mapped}.items():
        values = [value for key in keys.split("|") if (value := _value(config, key)) is not None]
        if values:
            yield name, values[0]
    yield from converter.fixed.items()
    yield from ((name, None) for name in converter.computed)


def _read(file: Path) -> Mapping[str, Json]:
    with machine_errors(file, "read"):
        if not file.is_file():
            raise _no_config(file, "There is no such file.")
        data = file.read_bytes()
    try:
        config = jsonread.loads(data)
    except ValueError as error:
        raise _no_config(file, f"It is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise _no_config(file, "It is not a JSON object.")
    return config


def _converter(recipes: RecipeKnowledge, config: Mapping[str, Json], file: Path) -> Converter:
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    for architecture in named:
        if architecture in recipes.converters:
            return recipes.converters[architecture]
    known = ", ".join(sorted(recipes.converters))
    raise _no_config(file, f"Its `architectures` are {json.dumps(named)}; Megatron-Bridge converts {known}.")


def _value(config: Mapping[str, Json], key: str) -> str | None:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    return None if value is None or isinstance(value, (dict, list)) else repr(value)


def _no_config(file: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} is no config of a model that Megatron-Bridge converts",
        why=why,
        fix="Name the config.json of the recipe's model on its hub, or leave --hf-config out.",
    )


def _unknown(recipe: str, recipes: RecipeKnowledge) -> UsageError:
    words = set(recipe.split("_"))
    near = sorted(recipes.recipes, key=lambda name: -len(words & set(name.split("_"))))[:3]
    return UsageError(
        f"there is no recipe {recipe!r}",
        why=f"Megatron-Bridge {recipes.release} has {len(recipes.recipes)} recipes; near: {', '.join(near)}.",
        fix="Name one of its functions: megatron.bridge.recipes has them.",
    )
