"""A matrix expanded into cases, each checked against the rules of its layout before anything starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from envbuild.catalog.models import LEAST_VOCABULARY, CaseSpec, GptModel, Matrix, Precision, Training
from envbuild.certify.ground import Ground
from envbuild.core.errors import ConfigurationError

HEAD_SIZE_MULTIPLE = 8
# A case's ID names a directory; smoke takes no longer one.
CASE_ID_LENGTH = 120
# With one or no entry on a tensor-parallel rank there is nothing to compare.
LEAST_VOCABULARY_PER_RANK = 2
AXES = ("data", "tensor", "pipeline", "virtual_pipeline")
PIPELINE_AXES = ("pipeline", "virtual_pipeline")
MODEL_SIZES = ("num_attention_heads", "hidden_size", "num_layers", "vocabulary_size")
BATCH = "global_batch_size"
SHARED_SIZES = (*MODEL_SIZES, BATCH)
OVERLAP = "overlap_p2p_comm"
# How many values of one field the search for the nearest layout looks at.
CANDIDATES = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes: how many processes share what."""

    data: int
    tensor: int
    pipeline: int
    virtual_pipeline: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data * self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """The layout in the field's short words: ``tp2-pp2``; ``baseline`` for one process."""
        sizes = (("dp", self.data), ("tp", self.tensor), ("pp", self.pipeline), ("vp", self.virtual_pipeline))
        return "-".join(f"{word}{size}" for word, size in sizes if size > 1) or "baseline"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One certification run. Its ID is made from its fields: ``gpt-fp32-tp2-pp2``."""

    model: str
    precision: Precision
    layout: Layout
    overlap_p2p_comm: bool

    @property
    def id(self) -> str:
        return f"{self.model}-{self.precision.value}-{self.layout.label}"

    @property
    def is_baseline(self) -> bool:
        return self.world_size == 1

    @property
    def world_size(self) -> int:
        """Number of processes, each with a GPU of its own where there are any."""
        return self.layout.world_size

    @property
    def baseline_id(self) -> str:
        """The case whose weights and numbers this one must reproduce."""
        return f"{self.model}-{self.precision.value}-baseline"


def expand(matrix: Matrix, name: str, ground: Ground) -> tuple[Case, ...]:
    """All cases of a matrix on a device, baselines first.

    Raises:
        ConfigurationError: the matrix is not for the device, a layout is impossible or known to be wrong, a case is
            listed twice, or a case has no baseline or no tolerance.
    """
    device = ground.device
    if device not in matrix.devices:
        raise ConfigurationError(
            f"matrix {name} is not for device {device.value}",
            why=f"It names the devices: {', '.join(item.value for item in matrix.devices)}.",
            fix="Choose another matrix with --matrix (`envbuild list matrices`).",
        )
    broken: list[_Row] = []
    problems: list[str] = []
    cases: dict[str, Case] = {}
    for position, spec in enumerate(matrix.cases):
        where = f"cases[{position}]"
        if spec.model not in matrix.models:
            known = ", ".join(matrix.models)
            problems.append(f"{where}: no model {spec.model!r} is defined; defined: {known}")
            continue
        case = _case(spec)
        if rules := broken_rules(spec, matrix.models[spec.model], matrix.training):
            broken.append(_Row(position=position, id=case.id, rules=rules))
        problems += [f"{where}: {problem}" for problem in _id_problems(case, cases)]
        if case.precision not in matrix.tolerance:
            problems.append(f"{where}: there is no [tolerance.{case.precision.value}]")
        cases[case.id] = case
    problems += _with_nearest(matrix, broken)
    problems += [
        f"{case.id}: its baseline {case.baseline_id} is not among the cases"
        for case in cases.values()
        if case.baseline_id not in cases
    ]
    if problems:
        raise ConfigurationError(
            f"matrix {name} has cases that cannot be run",
            why="\n".join(problems),
            fix=f"Correct envs/matrices/{name}.toml.",
        )
    return tuple(sorted(cases.values(), key=lambda case: not case.is_baseline))


def _case(spec: CaseSpec) -> Case:
    layout = Layout(data=spec.data, tensor=spec.tensor, pipeline=spec.pipeline, virtual_pipeline=spec.virtual_pipeline)
    overlap = spec.virtual_pipeline > 1 if spec.overlap_p2p_comm is None else spec.overlap_p2p_comm
    return Case(model=spec.model, precision=spec.precision, layout=layout, overlap_p2p_comm=overlap)


def _id_problems(case: Case, known: dict[str, Case]) -> list[str]:
    if len(case.id) > CASE_ID_LENGTH:
        return [
            f"{case.id} has {len(case.id)} characters; an ID has at most {CASE_ID_LENGTH}: shorten the model's name"
        ]
    if case.id not in known:
        return []
    if known[case.id] == case:
        return [f"{case.id} is listed twice"]
    return [f"{case.id} is the ID of another case too, which differs in overlap_p2p_comm; IDs must differ"]


@dataclass(frozen=True, kw_only=True)
class BrokenRule:
    """A rule that a case breaks, and the values that could be changed to keep it."""

    text: str
    axes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def broken_rules(spec: CaseSpec, model: GptModel, training: Training) -> list[BrokenRule]:
    """The rules of megatron-core's layouts that a case breaks: all that smoke refuses, and what trains wrongly."""
    return [*_broken_divisions(spec, model, training), *_broken_needs(spec, model)]


def _broken_divisions(spec: CaseSpec, model: GptModel, training: Training) -> list[BrokenRule]:
    heads, batch = model.num_attention_heads, training.global_batch_size
    samples = training.micro_batch_size * spec.data
    stages = spec.pipeline * spec.virtual_pipeline
    # value, its name in sentences, what it must be a multiple of, that in words, axes and sizes that could change
    rules: list[tuple[int, str, int, str, tuple[str, ...], tuple[str, ...]]] = [
        (model.hidden_size, "hidden_size", heads, "num_attention_heads", (), ("hidden_size",)),
        (model.num_layers, "num_layers", stages, "pipeline x virtual_pipeline =", PIPELINE_AXES, ("num_layers",)),
        (heads, "num_attention_heads", spec.tensor, "tensor =", ("tensor",), ("num_attention_heads",)),
        (model.vocabulary_size, "vocabulary_size", spec.tensor, "tensor =", ("tensor",), ("vocabulary_size",)),
        (batch, BATCH, samples, "micro_batch_size x data =", ("data",), (BATCH,)),
    ]
    # The interleaved schedule works through micro batches in groups of the pipeline's size.
    if spec.virtual_pipeline > 1 and batch % samples == 0:
        axes = ("data", *PIPELINE_AXES)
        count = batch // samples
        rules.append((count, "the number of micro batches", spec.pipeline, "pipeline =", axes, (BATCH,)))
    broken = [
        BrokenRule(text=f"{what} {value} must be a multiple of {of} {divisor}", axes=axes, sizes=sizes)
        for value, what, divisor, of, axes, sizes in rules
        if value % divisor
    ]
    head_size = model.hidden_size // heads
    if model.hidden_size % heads == 0 and head_size % HEAD_SIZE_MULTIPLE:
        text = (
            f"hidden_size / num_attention_heads is {head_size} and must be a multiple of {HEAD_SIZE_MULTIPLE} (no "
            "attention backend takes others)"
        )
        broken.append(BrokenRule(text=text, sizes=("hidden_size",)))
    return broken


def _broken_needs(spec: CaseSpec, model: GptModel) -> list[BrokenRule]:
    broken = []
    least = LEAST_VOCABULARY_PER_RANK * spec.tensor
    if model.vocabulary_size < least:
        text = (
            f"vocabulary_size {model.vocabulary_size} must be at least {LEAST_VOCABULARY_PER_RANK} x tensor = {least}"
        )
        broken.append(BrokenRule(text=text, axes=("tensor",), sizes=("vocabulary_size",)))
    if spec.virtual_pipeline > 1 and spec.pipeline == 1:
        broken.append(BrokenRule(text="virtual_pipeline needs pipeline > 1", axes=PIPELINE_AXES))
    axes = (OVERLAP, *PIPELINE_AXES)
    if spec.virtual_pipeline > 1 and spec.pipeline == 2 and spec.overlap_p2p_comm is False:
        text = (
            "virtual_pipeline with pipeline = 2 needs overlap_p2p_comm (with batched sends the next and the previous "
            "stage are one rank, and activations are taken for gradients: it trains, and it is wrong)"
        )
        broken.append(BrokenRule(text=text, axes=axes))
    if spec.virtual_pipeline == 1 and spec.pipeline > 1 and spec.overlap_p2p_comm is True:
        broken.append(BrokenRule(text="overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1", axes=axes))
    return broken


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the matrix that cannot be run."""

    position: int
    id: str
    rules: list[BrokenRule]


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """All that the rules look at for one row of a matrix."""

    spec: CaseSpec
    model: GptModel
    training: Training

    @classmethod
    def of(cls, spec: CaseSpec, matrix: Matrix) -> _Setting:
        return cls(spec=spec, model=matrix.models[spec.model], training=matrix.training)

    @property
    def holds(self) -> bool:
        return not broken_rules(self.spec, self.model, self.training)

    @property
    def values(self) -> dict[str, int]:
        """Every value that can be changed, by name."""
        values = {axis: getattr(self.spec, axis) for axis in AXES}
        values[OVERLAP] = _case(self.spec).overlap_p2p_comm
        values |= {name: getattr(self.model, name) for name in MODEL_SIZES}
        return values | {BATCH: self.training.global_batch_size}

    def changed(self, changes: dict[str, int]) -> _Setting | None:
        """The setting with other values, None when one is out of its bounds."""

        def of(names: tuple[str, ...]) -> dict[str, int]:
            return {name: changes[name] for name in names if name in changes}

        try:
            return _Setting(
                spec=CaseSpec.model_validate(self.spec.model_dump() | of((*AXES, OVERLAP))),
                model=GptModel.model_validate(self.model.model_dump() | of(MODEL_SIZES)),
                training=Training.model_validate(self.training.model_dump() | of((BATCH,))),
            )
        except ValidationError:
            return None


def _with_nearest(matrix: Matrix, broken: list[_Row]) -> list[str]:
    """A line for each row that cannot be run: the rules it breaks, and the nearest values that keep all rules."""
    lines = []
    ids = [_case(spec).id for spec in matrix.cases]
    advised: set[str] = set()
    for row in broken:
        # The first of several with one ID may keep it.
        later = {found for found in ids[row.position + 1 :] if found != row.id}
        changes = _nearest(matrix, row, advised.union(ids[: row.position], later))
        if changes is None:
            advice = "no values near it satisfy all rules: leave the case out"
        else:
            spec = matrix.cases[row.position]
            axes = {name: value for name, value in changes.items() if hasattr(spec, name)}
            # The next row is not sent to the same place.
            advised.add(_case(spec.model_copy(update=axes)).id)
            shown = ", ".join(f"{name} = {str(value).lower()}" for name, value in changes.items())
            advice = f"the nearest that satisfies all rules: {shown}"
        rules = "; ".join(rule.text for rule in row.rules)
        lines.append(f"cases[{row.position}] ({row.id}): {rules}; {advice}")
    return lines


def _nearest(matrix: Matrix, row: _Row, taken: set[str]) -> dict[str, int] | None:
    """The nearest values with which a row can be run: of its own layout, or else of the sizes that all share.

    They give the row an ID that no other has, and keep runnable what is.
    """
    own = _Setting.of(matrix.cases[row.position], matrix)
    axes = tuple(dict.fromkeys(axis for rule in row.rules for axis in rule.axes))
    others = [
        _Setting.of(spec, matrix)
        for position, spec in enumerate(matrix.cases)
        if position != row.position and spec.model in matrix.models
    ]
    running = [other for other in others if other.holds]
    searches = (
        (changes for changes in _layouts(own, axes) if not _turned_off(own, changes)),
        # Sizes that suit the rows with problems too, where there are such.
        _layouts_and_sizes(own, axes, others),
        _layouts_and_sizes(own, axes, running),
    )
    for search in searches:
        for changes in sorted(search, key=lambda changes: _cost(own, changes)):
            changed = own.changed(changes)
            if changed is None or not changed.holds:
                continue
            if _case(changed.spec).id in taken:
                continue
            shared = {name: value for name, value in changes.items() if name in SHARED_SIZES}
            if all(_still_holds(other, own, shared) for other in running):
                return changes
    return None


def _turned_off(own: _Setting, changes: dict[str, int]) -> int:
    """How many kinds of parallelism the row would lose: it would no longer be the case that somebody wanted."""
    before = own.values
    return sum(axis in changes and changes[axis] == 1 < before[axis] for axis in AXES)


def _cost(own: _Setting, changes: dict[str, int]) -> tuple[int, int, int, float]:
    """How far changes go: what the row loses, shared sizes changed, values changed, and by how much."""
    before = own.values
    shared = sum(name in SHARED_SIZES for name in changes)
    distance = sum(abs(value - before[name]) / before[name] for name, value in changes.items() if name != OVERLAP)
    return _turned_off(own, changes), shared, len(changes), distance


def _still_holds(other: _Setting, own: _Setting, shared: dict[str, int]) -> bool:
    if other.spec.model != own.spec.model:
        shared = {name: value for name, value in shared.items() if name not in MODEL_SIZES}
    changed = other.changed(shared)
    return changed is not None and changed.holds


def _layouts(own: _Setting, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """What to change of the axes, for every layout near the row's own."""
    before = own.values
    possible = [_axis_values(own, axis) for axis in axes]
    for values in itertools.product(*possible):
        yield {axis: value for axis, value in zip(axes, values, strict=True) if value != before[axis]}


def _axis_values(own: _Setting, axis: str) -> list[int]:
    model, training = own.model, own.training
    before = own.values[axis]
    if axis == OVERLAP:
        return [before, not before]
    whole = {
        "data": training.global_batch_size // training.micro_batch_size,
        "tensor": math.gcd(model.num_attention_heads, model.vocabulary_size),
    }.get(axis, model.num_layers)
    divisors = [size for size in range(1, whole + 1) if whole % size == 0]
    nearest = sorted(divisors, key=lambda size: abs(size - before))[:CANDIDATES]
    # 1 and 2 divide what the sizes can be made to, too.
    return list(dict.fromkeys([before, *nearest, 1, 2]))


def _layouts_and_sizes(own: _Setting, axes: tuple[str, ...], others: list[_Setting]) -> Iterator[dict[str, int]]:
    """What to change of the axes and of the sizes, with sizes that the other rows divide as well."""
    for layout in _layouts(own, axes):
        changed = own.changed(layout)
        if changed is None:
            continue
        rules = broken_rules(changed.spec, changed.model, changed.training)
        wanted = {size for rule in rules for size in rule.sizes}
        yield from (layout | found for found in _sizes(changed, wanted, others))


def _sizes(own: _Setting, wanted: set[str], others: list[_Setting]) -> Iterator[dict[str, int]]:
    related = [own.spec, *(other.spec for other in others if other.spec.model == own.spec.model)]
    everyone = [own.spec, *(other.spec for other in others)]
    tensor = math.lcm(*(spec.tensor for spec in related))
    vocabulary = LEAST_VOCABULARY_PER_RANK * max(spec.tensor for spec in related)
    layers = math.lcm(*(spec.pipeline * spec.virtual_pipeline for spec in related))
    groups = (spec.data * (spec.pipeline if spec.virtual_pipeline > 1 else 1) for spec in everyone)
    batch = math.lcm(*groups) * own.training.micro_batch_size
    before = own.values

    def near(name: str, divisor: int, least: int = 1) -> list[int]:
        value = before[name]
        if name not in wanted or (value % divisor == 0 and value >= least):
            return [value]
        below = max(value // divisor, math.ceil(least / divisor), 1) * divisor
        return list(dict.fromkeys([below, max(below, math.ceil(value / divisor) * divisor)]))

    for heads in near("num_attention_heads", tensor):
        wanted = wanted | {"hidden_size"} if heads != before["num_attention_heads"] else wanted
        for values in itertools.product(
            near("hidden_size", HEAD_SIZE_MULTIPLE * heads),
            near("num_layers", layers),
            near("vocabulary_size", tensor, max(vocabulary, LEAST_VOCABULARY)),
            near(BATCH, batch),
        ):
            names = ("hidden_size", "num_layers", "vocabulary_size", BATCH)
            found = {"num_attention_heads": heads, **dict(zip(names, values, strict=True))}
            yield {name: value for name, value in found.items() if value != before[name]}
