"""A matrix expanded into cases, each checked against the rules of its layout before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.catalog.models import CaseSpec, Device, GptModel, Matrix, Precision, Training
from envbuild.core.errors import ConfigurationError

HEAD_SIZE_MULTIPLE = 8


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
        return self.layout.world_size == 1

    @property
    def baseline_id(self) -> str:
        """The case whose weights and numbers this one must reproduce."""
        return f"{self.model}-{self.precision.value}-baseline"


def expand(matrix: Matrix, name: str, device: Device) -> tuple[Case, ...]:
    """All cases of a matrix on a device, baselines first.

    Raises:
        ConfigurationError: the matrix is not for the device, a layout is impossible or known to be wrong, a case is
            listed twice, or a case has no baseline or no tolerance.
    """
    if device not in matrix.devices:
        raise ConfigurationError(
            f"matrix {name} is not for device {device.value}",
            why=f"It names the devices: {', '.join(item.value for item in matrix.devices)}.",
            fix="Choose another matrix with --matrix (`envbuild list matrices`).",
        )
    problems: list[str] = []
    cases: dict[str, Case] = {}
    for position, spec in enumerate(matrix.cases):
        where = f"cases[{position}]"
        if spec.model not in matrix.models:
            known = ", ".join(matrix.models)
            problems.append(f"{where}: no model {spec.model!r} is defined; defined: {known}")
            continue
        case = _case(spec)
        problems += [
            f"{where} ({case.id}): {problem}"
            for problem in broken_rules(spec, case, matrix.models[spec.model], matrix.training)
        ]
        if case.id in cases:
            problems.append(f"{where}: {case.id} is listed twice")
        if case.precision not in matrix.tolerance:
            problems.append(f"{where}: there is no [tolerance.{case.precision.value}]")
        cases[case.id] = case
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


def broken_rules(spec: CaseSpec, case: Case, model: GptModel, training: Training) -> list[str]:
    """The rules of megatron-core's layouts that a case breaks, each with the nearest value that works."""
    layout = case.layout
    problems: list[str] = []

    def multiple(value: int, divisor: int, what: str, of: str) -> None:
        if value % divisor:
            nearest = max(divisor, round(value / divisor) * divisor)
            problems.append(f"{what} {value} must be a multiple of {of} {divisor}; the nearest is {nearest}")

    multiple(model.hidden_size, model.num_attention_heads, "hidden_size", "num_attention_heads")
    head_size = model.hidden_size // model.num_attention_heads
    if head_size % HEAD_SIZE_MULTIPLE:
        nearest = max(1, round(head_size / HEAD_SIZE_MULTIPLE)) * HEAD_SIZE_MULTIPLE * model.num_attention_heads
        problems.append(
            f"hidden_size / num_attention_heads is {head_size} and must be a multiple of {HEAD_SIZE_MULTIPLE} (no "
            f"attention backend takes others); the nearest hidden_size is {nearest}"
        )
    stages = layout.pipeline * layout.virtual_pipeline
    multiple(model.num_layers, stages, "num_layers", "pipeline x virtual_pipeline =")
    multiple(model.num_attention_heads, layout.tensor, "num_attention_heads", "tensor =")
    multiple(model.vocabulary_size, layout.tensor, "vocabulary_size", "tensor =")
    samples = training.micro_batch_size * layout.data
    multiple(training.global_batch_size, samples, "global_batch_size", "micro_batch_size x data =")
    if layout.virtual_pipeline > 1:
        if layout.pipeline == 1:
            problems.append("virtual_pipeline needs pipeline > 1; the nearest is pipeline = 2")
        else:
            multiple(
                training.global_batch_size // samples, layout.pipeline, "the number of micro batches", "pipeline ="
            )
        if layout.pipeline == 2 and spec.overlap_p2p_comm is False:
            problems.append(
                "virtual_pipeline with pipeline = 2 needs overlap_p2p_comm: with batched sends the next and the "
                "previous stage are one rank, and activations are taken for gradients: it trains, and it is wrong"
            )
    return problems
