"""The nearest shape that works, for a row of a matrix that breaks a rule."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from envbuild.catalog.models import LEAST_VOCABULARY, AttentionBackend, Normalization, Precision, Recompute
from envbuild.certify.cases.case import ResolvedRow
from envbuild.certify.cases.rules import (
    BATCH,
    FP8_MULTIPLE,
    HEAD_SIZE_MULTIPLE,
    LEAST_VOCABULARY_PER_RANK,
    OVERLAP,
    BrokenRule,
    broken_rules,
)

M = TypeVar("M", bound=BaseModel)
Value = int | str | bool
Changes = dict[str, Value]

PARALLEL = ("data", "tensor", "pipeline", "virtual_pipeline", "context", "expert")
MODEL_SIZES = (
    "num_attention_heads",
    "num_query_groups",
    "hidden_size",
    "num_layers",
    "vocabulary_size",
    "sequence_length",
    "num_experts",
    "normalization",
)
SHARED_SIZES = (*MODEL_SIZES, BATCH)
# What an axis is when it does nothing: turned to that, a case is no longer the one that somebody wanted.
OFF: Changes = {
    **dict.fromkeys(PARALLEL, 1),
    "sequence": False,
    "distributed_optimizer": False,
    "recompute": Recompute.NONE.value,
}
# How many values of one axis the search looks at, by how many axes change at once.
CANDIDATES = {1: 12, 2: 8, 3: 4}


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A row that cannot be run: where it is among the rows, and the rules that it breaks."""

    index: int
    rules: tuple[BrokenRule, ...]


def with_nearest(rows: Sequence[tuple[int, ResolvedRow]], broken: Sequence[Broken]) -> list[str]:
    """A line for each row that cannot be run: the rules it breaks, and the nearest values that keep all rules."""
    lines = []
    ids = [row.case.id for _, row in rows]
    advised: set[str] = set()
    stuck = {item.index for item in broken}
    for item in broken:
        position, row = rows[item.index]
        others = [other for index, (_, other) in enumerate(rows) if index != item.index]
        running = [other for index, (_, other) in enumerate(rows) if index not in stuck]
        # The first of several with one ID may keep it.
        later = {found for found in ids[item.index + 1 :] if found != row.case.id}
        taken = advised.union(ids[: item.index], later)
        search = _Search(row, others, running, taken)
        changes = search.nearest(item.rules)
        if changes is None:
            advice = "no values near it satisfy all rules: leave the case out"
        else:
            # The next row is not sent to the same place.
            advised.add(changed_row(row, changes, own_only=True).case.id)
            shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in changes.items())
            advice = f"the nearest that satisfies all rules: {shown}"
        rules = "; ".join(rule.text for rule in item.rules)
        lines.append(f"cases[{position}] ({row.case.id}): {rules}; {advice}")
    return lines


def values_of(row: ResolvedRow) -> Changes:
    """Every value that can be changed, by name, as it stands in the file."""
    spec, model = row.spec, row.model
    values: Changes = {axis: getattr(spec, axis) for axis in PARALLEL}
    values |= {"sequence": spec.sequence, "distributed_optimizer": spec.distributed_optimizer}
    values |= {"recompute": spec.recompute.value, "attention_backend": row.attention_backend.value}
    values |= {OVERLAP: row.overlap_p2p_comm, "micro_batch_size": row.micro_batch_size, BATCH: row.global_batch_size}
    values |= {name: _plain(getattr(model, name)) for name in MODEL_SIZES if hasattr(model, name)}
    values["num_query_groups"] = model.query_groups
    if model.moe is not None:
        values["num_experts"] = model.moe.num_experts
    if spec.resume_at is not None:
        values["resume_at"] = spec.resume_at
    return values


def _plain(value: Value | Enum) -> Value:
    return value.value if isinstance(value, Enum) else value


def is_shared(row: ResolvedRow, name: str) -> bool:
    """Whether a value is that of other rows too, and not the row's own."""
    return name in MODEL_SIZES or (name == BATCH and row.spec.global_batch_size is None)


def changed_row(row: ResolvedRow, changes: Changes, *, own_only: bool = False) -> ResolvedRow:
    """The row with other values.

    Args:
        own_only: without what it shares with others.

    Raises:
        ValidationError: one is out of its bounds.
    """
    shared = {} if own_only else {name: value for name, value in changes.items() if is_shared(row, name)}
    own = {name: value for name, value in changes.items() if not is_shared(row, name)}
    model: Changes = {name: value for name, value in shared.items() if name != BATCH}
    experts = model.pop("num_experts", None)
    moe = row.model.moe
    made = _updated(row.model, model)
    if experts is not None and moe is not None:
        made = made.model_copy(update={"moe": _updated(moe, {"num_experts": experts})})
    training = _updated(row.training, {BATCH: shared[BATCH]} if BATCH in shared else {})
    return replace(row, spec=_updated(row.spec, own), model=made, training=training)


def _updated(model: M, changes: Changes) -> M:
    return type(model).model_validate(model.model_dump() | changes) if changes else model


class _Search:
    """The search for the values nearest to a row's that can be run.

    Args:
        others: the other rows of the matrix.
        running: those of them that can be run, and have to stay so.
        taken: the IDs that it may not have.
    """

    def __init__(
        self, row: ResolvedRow, others: list[ResolvedRow], running: list[ResolvedRow], taken: set[str]
    ) -> None:
        self._row, self._others, self._running, self._taken = row, others, running, taken
        self._before = values_of(row)
        self._ids = {other.case.id for other in others}

    def nearest(self, rules: Iterable[BrokenRule]) -> Changes | None:
        """The nearest values: of the row's own axes, or else of the sizes that all share.

        They give the row an ID that no other has, and keep runnable what is.
        """
        if any(rule.ground for rule in rules):
            return None
        axes = tuple(dict.fromkeys(axis for rule in rules for axis in rule.axes if axis in self._before))
        searches = (
            (changes for changes in self._layouts(axes, 3) if not self._turned_off(changes)),
            # Sizes that suit the rows with problems too, where there are such.
            self._layouts_and_sizes(axes, self._others),
            self._layouts_and_sizes(axes, self._running),
        )
        for search in searches:
            for changes in sorted(search, key=self._cost):
                if self._is_good(changes):
                    return changes
        return None

    def _is_good(self, changes: Changes) -> bool:
        try:
            changed = changed_row(self._row, changes)
            if not changes or broken_rules(changed):
                return False
            own = changed_row(self._row, changes, own_only=True).case
            known = own.is_baseline or own.baseline_id == self._row.case.baseline_id or own.baseline_id in self._ids
            return own.id not in self._taken and known and self._others_still_run(changes)
        except ValidationError:
            return False

    def _others_still_run(self, changes: Changes) -> bool:
        shared = {name: value for name, value in changes.items() if is_shared(self._row, name)}
        if any(other.spec.global_batch_size == shared.get(BATCH, 0) for other in self._others):
            return False
        for other in self._running:
            alike = other.spec.model == self._row.spec.model
            theirs = {
                name: value
                for name, value in shared.items()
                if (alike or name not in MODEL_SIZES) and is_shared(other, name)
            }
            if theirs and broken_rules(changed_row(other, theirs)):
                return False
        return True

    def _turned_off(self, changes: Changes) -> int:
        """How much the row would lose: it would no longer be the case that somebody wanted."""
        return sum(name in OFF and value == OFF[name] != self._before[name] for name, value in changes.items())

    def _cost(self, changes: Changes) -> tuple[int, int, int, float]:
        """How far changes go: what the row loses, shared sizes changed, values changed, and by how much."""
        shared = sum(is_shared(self._row, name) for name in changes)
        return self._turned_off(changes), shared, len(changes), sum(self._distance(*item) for item in changes.items())

    def _distance(self, name: str, value: Value) -> float:
        before = self._before[name]
        if isinstance(before, int) and isinstance(value, int) and not isinstance(before, bool):
            return abs(value - before) / before
        return 0.0

    def _layouts(self, axes: tuple[str, ...], most: int) -> Iterator[Changes]:
        """What to change of the axes: of at most so many at once, to values near the row's own."""
        for count in range(min(most, len(axes)) + 1):
            for chosen in itertools.combinations(axes, count):
                possible = [self._axis_values(axis, CANDIDATES[max(count, 1)]) for axis in chosen]
                for values in itertools.product(*possible):
                    yield dict(zip(chosen, values, strict=True))

    def _axis_values(self, axis: str, number: int) -> list[Value]:
        """Other values of an axis, the nearest first."""
        row, before = self._row, self._before[axis]
        if isinstance(before, bool):
            return [not before]
        if isinstance(before, str):
            kind = Recompute if axis == "recompute" else AttentionBackend
            return [item.value for item in kind if item.value != before]
        if axis == "resume_at":
            return [row.training.steps - 1] if row.training.steps > 1 else []
        if axis == BATCH:
            return self._batches(number)
        model, batch = row.model, row.global_batch_size
        split = (model.num_attention_heads, model.query_groups, model.vocabulary_size)
        whole = {
            "data": batch // row.micro_batch_size,
            "micro_batch_size": batch,
            "tensor": math.gcd(*split),
            "context": max(model.sequence_length // 2, 1),
            "expert": model.moe.num_experts if model.moe else 1,
        }.get(axis, model.num_layers)
        near = sorted(divisors(whole), key=lambda size: abs(size - before))[:number]
        # 1 and 2 divide what the sizes can be made to, too.
        return [size for size in dict.fromkeys([*near, 1, 2]) if size != before]

    def _batches(self, number: int) -> list[Value]:
        spec, batch = self._row.spec, self._row.global_batch_size
        step = self._row.micro_batch_size * spec.data * (spec.pipeline if spec.virtual_pipeline > 1 else 1)
        found = [step * max(batch // step + more, 1) for more in range(min(number, 3))]
        return [size for size in dict.fromkeys(found) if size != batch]

    def _layouts_and_sizes(self, axes: tuple[str, ...], others: list[ResolvedRow]) -> Iterator[Changes]:
        """What to change of the axes and of the sizes, with sizes that the other rows divide as well."""
        for layout in self._layouts(axes, 2):
            try:
                changed = changed_row(self._row, layout)
            except ValidationError:
                continue
            rules = broken_rules(changed)
            if all(rule.sizes for rule in rules):
                wanted = {size for rule in rules for size in rule.sizes}
                yield from (layout | found for found in sizes_near(changed, wanted, others))


def divisors(whole: int) -> list[int]:
    """All divisors of a whole number above 0."""
    small = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
    return sorted({*small, *(whole // size for size in small)}) or [1]


def sizes_near(own: ResolvedRow, wanted: set[str], others: list[ResolvedRow]) -> Iterator[Changes]:
    """Values of the sizes wanted, near the row's own, that it and the others divide."""
    related = [own, *(other for other in others if other.spec.model == own.spec.model)]
    model, specs = own.model, [row.spec for row in related]
    tensor = math.lcm(*(spec.tensor for spec in specs))
    fp8 = FP8_MULTIPLE * tensor if any(spec.precision is Precision.FP8 for spec in specs) else 1
    layers = math.lcm(*(spec.pipeline * spec.virtual_pipeline for spec in specs))
    experts = math.lcm(*(spec.expert for spec in specs))
    vocabulary = LEAST_VOCABULARY_PER_RANK * max(spec.tensor for spec in specs)
    for heads in _near(model.num_attention_heads, tensor) if "num_attention_heads" in wanted else [None]:
        number = heads or model.num_attention_heads
        moved = {"hidden_size", "num_query_groups"} if heads and heads != model.num_attention_heads else set()
        possible: dict[str, Sequence[Value]] = {
            "num_query_groups": _groups(model.query_groups, number, tensor),
            "hidden_size": _near(model.hidden_size, math.lcm(HEAD_SIZE_MULTIPLE * number, fp8)),
            "num_layers": [len(model.mamba.hybrid_override_pattern)]
            if model.mamba
            else _near(model.num_layers, layers),
            "vocabulary_size": _near(model.vocabulary_size, tensor, max(vocabulary, LEAST_VOCABULARY)),
            "sequence_length": _near(model.sequence_length, math.lcm(*map(_sequence_step, related))),
            "num_experts": _near(model.moe.num_experts, experts, model.moe.router_topk) if model.moe else [],
            BATCH: _near(own.global_batch_size, _batch_step(own, others)),
            "normalization": [Normalization.RMS.value],
        }
        chosen = {name: values for name, values in possible.items() if name in wanted | moved}
        if model.num_query_groups is None:
            chosen.pop("num_query_groups", None)
        before = values_of(own)
        for values in itertools.product(*chosen.values()):
            found: Changes = dict(zip(chosen, values, strict=True))
            if heads:
                found = {"num_attention_heads": heads, **found}
            yield {name: value for name, value in found.items() if value != before[name]}


def _near(value: int, divisor: int, least: int = 1) -> list[int]:
    """The value if it is a multiple and large enough, else the multiples around it."""
    if value % divisor == 0 and value >= least:
        return [value]
    below = max(value // divisor, math.ceil(least / divisor), 1) * divisor
    return list(dict.fromkeys([below, max(below, math.ceil(value / divisor) * divisor)]))


def _groups(groups: int, heads: int, tensor: int) -> list[int]:
    possible = [size for size in divisors(heads) if size % tensor == 0]
    return sorted(possible, key=lambda size: abs(size - groups))[:2]


def _sequence_step(row: ResolvedRow) -> int:
    spec = row.spec
    parts = spec.context * (spec.tensor if spec.sequence else 1)
    step = math.lcm(parts, 2 * spec.context if spec.context > 1 else 1)
    return math.lcm(step, FP8_MULTIPLE * parts) if spec.precision is Precision.FP8 else step


def _batch_step(own: ResolvedRow, others: list[ResolvedRow]) -> int:
    rows = [own, *(other for other in others if other.spec.global_batch_size is None)]
    steps = (
        row.micro_batch_size * row.spec.data * (row.spec.pipeline if row.spec.virtual_pipeline > 1 else 1)
        for row in rows
    )
    return math.lcm(*steps)
