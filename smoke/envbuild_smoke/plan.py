"""The plan as frozen values: what to train, how it is split over ranks, and what it is run for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SCHEMA = "envbuild.plan/1"

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
LayerSpec = Literal["local", "transformer-engine"]


class PlanError(Exception):
    """The plan cannot be run as written."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT to train; sizes in elements, `sequence_length` in tokens."""

    kind: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    sequence_length: int
    vocabulary_size: int
    layer_spec: LayerSpec = "local"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ways each kind of parallelism splits the work; 1 means not at all."""

    data: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    sequence: bool

    @property
    def world_size(self) -> int:
        """Number of ranks; expert parallelism reuses the data-parallel ones."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train; batch sizes in samples, `global_batch_size` over all ranks together."""

    steps: int
    micro_batch_size: int
    global_batch_size: int
    learning_rate: float
    clip_grad_norm: float
    seed: int

    def microbatches(self, layout: Layout) -> int:
        """Return the number of micro batches each data-parallel rank runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * layout.data)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings handed to megatron-core's ModelParallelConfig as they are."""

    overlap_p2p_comm: bool
    batch_p2p_comm: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. `baseline` is None for a baseline, else the case whose checkpoint is loaded."""

    id: str
    baseline: str | None
    driver: str
    model: str
    precision: Precision
    layout: Layout
    world_size: int
    training: Training
    settings: Settings
    time_limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cases of a run, baselines first, and what they are run for.

    `content` is the plan as it was read, byte for byte; `digest` is "sha256:..." of it.
    """

    nonce: str
    subject: Mapping[str, str]
    device: Device
    expected_versions: Mapping[str, str]
    models: Mapping[str, Model]
    cases: tuple[Case, ...]
    digest: str
    content: bytes

    def case(self, case_id: str) -> Case:
        """Return the case with this id; KeyError if there is none."""
        return {case.id: case for case in self.cases}[case_id]

    def selection(self, only: tuple[str, ...]) -> tuple[Case, ...]:
        """Return the cases named in `only` and the baselines they need; all of them when it is empty."""
        if not only:
            return self.cases
        known = {case.id: case for case in self.cases}
        unknown = sorted(set(only) - known.keys())
        if unknown:
            raise PlanError(f"--only names {', '.join(unknown)}; the plan has {', '.join(known)}")
        wanted = set(only)
        # Without its baseline a case has no weights to start from, so the baseline comes along.
        wanted.update(baseline for name in only if (baseline := known[name].baseline) is not None)
        return tuple(case for case in self.cases if case.id in wanted)
