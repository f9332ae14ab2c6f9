"""Accounts for every field of the library's configuration: varied by cases, fixed, without effect, or blind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, JsonValue

from envbuild.catalog.fields import TomlModel
from envbuild.certify.fields.knowledge import FieldKnowledge, RecipeKnowledge, Trials, library_field
from envbuild.certify.models import CaseVerdict

CONFIGURATION = "configuration"


class FieldAccount(TomlModel):
    """What the cases that passed say of each field, by name: ``model.num_layers``.

    Values are text. ``varied`` fields have several, ``fixed`` ones one, which is what recipes use; ``without_effect``
    has the reason; ``blind`` ones have the values of the cases, and recipes use others.
    """

    varied: dict[str, tuple[str, ...]] = Field(description="a wrong value fails a case")
    fixed: dict[str, str]
    without_effect: dict[str, str]
    blind: dict[str, tuple[str, ...]]

    def values_of(self, field: str) -> tuple[str, ...]:
        """The values that cases have; none for a field that the version lacks."""
        fixed = (self.fixed[field],) if field in self.fixed else ()
        return self.varied.get(field) or self.blind.get(field) or fixed

    def __contains__(self, field: object) -> bool:
        return any(field in kind for kind in (self.varied, self.fixed, self.without_effect, self.blind))

    @property
    def count(self) -> int:
        """Of all fields."""
        return len(self.varied) + len(self.fixed) + len(self.without_effect) + len(self.blind)


@dataclass(frozen=True)
class _Observed:
    """What cases had, by their ID.

    Attributes:
        defaults: of all fields; of one that several kinds of models have, the first baseline's.
        own_defaults: by baseline, as each kind of model has its own.
    """

    values: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, str]
    own_defaults: Mapping[str, Mapping[str, str]]
    baselines: Mapping[str, str]

    def value(self, case: str, field: str) -> str:
        own = self.own_defaults.get(self.baselines.get(case, case), {})
        return self.values[case].get(field, own.get(field, self.defaults[field]))

    def all_values(self, field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.value(case, field) for case in self.values))

    def is_compared(self, field: str) -> bool:
        """Whether a case has another value than the baseline whose numbers it has."""
        return any(
            self.value(case, field) != self.value(baseline, field)
            for case, baseline in self.baselines.items()
            if baseline in self.values
        )


def account_of(
    verdicts: Sequence[CaseVerdict], version: str, recipes: RecipeKnowledge, known: FieldKnowledge
) -> FieldAccount | None:
    """The account of a run; None where its driver reports no configuration.

    Args:
        verdicts: of the cases that passed.
        version: of megatron-core.
    """
    observed = _observed(verdicts)
    if not observed.defaults:
        return None
    trials = known.trials_of(version)
    used = _used_by_recipes(recipes, observed.defaults)
    varied: dict[str, tuple[str, ...]] = {}
    fixed: dict[str, str] = {}
    blind: dict[str, tuple[str, ...]] = {}
    without = {
        name: reason
        for name in observed.defaults
        if name in trials.digits and (reason := known.without_effect.get(name) or _switched_off(name, observed, known))
    }
    for name in observed.defaults:
        values = observed.all_values(name)
        if name in without:
            continue
        if len(values) > 1 and _is_noticed(name, observed, trials):
            varied[name] = values
        elif len(values) == 1 and all(same_value(value, values[0]) for value in used.get(name, {values[0]})):
            fixed[name] = values[0]
        else:
            blind[name] = values
    return FieldAccount(varied=varied, fixed=fixed, without_effect=without, blind=blind)


def _switched_off(field: str, observed: _Observed, known: FieldKnowledge) -> str:
    """Why no case has a use for a field; empty where one may have."""
    switch = known.switch_of(field)
    if switch is None or switch[0] not in observed.defaults:
        return ""
    name, value = switch
    if any(is_on(observed.value(case, name), value, observed.defaults[name]) for case in observed.values):
        return ""
    return f"it has an effect only with {name}" + (f" = {value}" if value else " set")


def is_on(value: str, switched: str | None, default: str) -> bool:
    """Whether a field that others need has the value that they need: any but its default where that is None."""
    return not same_value(value, default) if switched is None else same_value(value, switched)


def _is_noticed(field: str, observed: _Observed, trials: Trials) -> bool:
    """Whether a case fails where the library computes with another value than the reference or the baseline."""
    return field in trials.caught or observed.is_compared(field)


def _used_by_recipes(recipes: RecipeKnowledge, known: Mapping[str, str]) -> dict[str, set[str]]:
    """The values that recipes use of each field that any of them or of their converters sets.

    Where a converter sets it, its values are in configs that nobody has here: they are unknown, ``?``.
    """
    used: dict[str, set[str]] = {}
    for recipe_field in recipes.fields:
        if field := library_field(recipe_field, known):
            values = recipes.values_of(recipe_field)
            # What a recipe leaves alone has the library's default.
            default = {known[field]} if sum(values.values()) < len(recipes.recipes) else set()
            used.setdefault(field, set()).update({*values} | default)
    for field in recipes.hub_fields() & known.keys():
        used.setdefault(field, set()).add("?")
    return used


def _observed(verdicts: Iterable[CaseVerdict]) -> _Observed:
    values: dict[str, Mapping[str, str]] = {}
    defaults: dict[str, dict[str, str]] = {}
    baselines = {}
    for verdict in verdicts:
        configured = (verdict.observed or {}).get(CONFIGURATION)
        if not isinstance(configured, dict):
            continue
        values[verdict.id] = dict(_texts(configured.get("values")))
        if verdict.baseline is None:
            defaults[verdict.id] = dict(_texts(configured.get("defaults")))
        else:
            baselines[verdict.id] = verdict.baseline
    every = {name: value for own in reversed(defaults.values()) for name, value in own.items()}
    return _Observed(values, every, defaults, baselines)


def _texts(value: JsonValue) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield from ((name, text) for name, text in value.items() if isinstance(text, str))


def without_configuration(verdict: CaseVerdict) -> CaseVerdict:
    """A verdict without what the account was made of: certificates and reports have the account."""
    observed = {name: value for name, value in (verdict.observed or {}).items() if name != CONFIGURATION}
    return verdict if verdict.observed is None else verdict.model_copy(update={"observed": observed})


def same_value(one: str, other: str) -> bool:
    """Whether two texts are one value: ``1`` and ``1.0`` are."""
    if one == other:
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def is_number(value: str) -> bool:
    """Whether a text is a number, and no truth value."""
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value) is not None
