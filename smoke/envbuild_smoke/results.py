"""The lines of `results.jsonl` as frozen values: written by the runner, read by whoever judges.

First a line of type run, then one of type node for each other node of the run, then one of type case for each case and
repeat in the order they ended, then those of type bandwidth that the plan asks for, last one of type end. A run that
was cut short lacks the end; where it was taken up again stands a line of type resumed. None is a number that is not
finite, for which JSON has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from envbuild_smoke.plan.json_reader import NOT_NEGATIVE, Rule, at_least, matching

Schema = Literal["envbuild.results/2"]
SCHEMA: Schema = "envbuild.results/2"
Status = Literal["completed", "failed", "timed-out", "not-run"]
FailureKind = Literal[
    "exception", "exit", "signal", "timeout", "baseline-missing", "incomplete", "not-finite", "terminated", "node-lost"
]
FindingCode = Literal[
    "package-missing",
    "version-mismatch",
    "package-twice",
    "imported-version-differs",
    "file-missing",
    "file-differs",
    "bytecode-differs",
    "shadowed",
    "imported-unlisted",
    "startup-code",
    "other-python",
    "library-twice",
    "module-missing",
    "unusable",
]
# On a node, across two, or over as many as are up to now.
Sweep = Literal["node", "pair", "ramp"]
PROJECTIONS = 4
# Significant ones.
FLOAT32_BITS = 24
Count = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Amount = Annotated[float, NOT_NEGATIVE]
Digest = Annotated[str, matching(r"sha256:[0-9a-f]{64}", "a digest: sha256: and 64 hexadecimal digits")]
Moment = Annotated[str, matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "a moment such as 2026-01-31T23:59:59Z")]
Projections = Annotated[tuple[float, ...], Rule(f"an array of {PROJECTIONS}", lambda value: len(value) == PROJECTIONS)]
# As nvidia-smi prints the clocks, temperature, memory and throttling of a GPU, by name.
GpuState = Annotated[Mapping[str, str], Rule("an object with its index", lambda value: "index" in value)]


def written(default: Any) -> Any:
    """Declare a field that the runner may leave out, and that a line has all the same."""
    return field(default=default, metadata={"written": True})


@dataclass(frozen=True)
class Finding:
    """A difference between the lock and the environment."""

    code: FindingCode
    package: str | None
    expected: str | None
    found: str | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a case did not complete: its earliest failing rank on its node, or None where no single one is to blame.

    `exit_status` is negative for a signal; `log` is relative to the output directory. Kind terminated: a rank was told
    to end (SIGTERM), as Slurm does to all processes of a job.
    """

    kind: FailureKind
    message: str
    rank: int | None = None
    exit_status: int | None = None
    log: str | None = None
    node: Count | None = None

    @property
    def is_from_outside(self) -> bool:
        """Whether it is no fault of the case, which is trained again where the run is resumed."""
        return self.kind in ("node-lost", "terminated")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step: the mean loss over the tokens of the global batch, and the gradients' norm before clipping."""

    step: Positive
    loss: float | None
    grad_norm: float | None
    seconds: Amount


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The final weights against the baseline's."""

    compared_with: str
    tensors: Count
    largest_relative_difference: float | None
    worst: str | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of a tensor in few numbers; its projections are on vectors of random signs, the same everywhere."""

    name: str
    norm: Amount
    projections: Projections


@dataclass(frozen=True, kw_only=True)
class PerturbedStep:
    """A step of a training with moved weights."""

    step: Positive
    loss: float
    grad_norm: float


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """A baseline's training with each weight moved by one unit in the last place.

    `weights` is the largest relative difference of a tensor of the final weights from the baseline's.
    """

    steps: tuple[PerturbedStep, ...]
    gradients: tuple[Gradient, ...]
    weights: float | None


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """||own - reference|| / ||reference|| of a tensor; `spread` is what rounding may make of it, in bf16 and fp8."""

    name: str
    relative_difference: float | None
    spread: float | None = None


@dataclass(frozen=True, kw_only=True)
class Float32Part:
    """What a library computes in float32 where all else has fewer bits, next to float64 from the same inputs.

    `spread` is what float32 does to it. `bits` are the significant bits of the type that its result is in, to which
    that of float64 is rounded.
    """

    part: Literal["accumulation", "softmax", "loss", "main weights"]
    name: str
    relative_difference: float | None
    spread: float | None
    bits: Positive


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """A step of the reference."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True, kw_only=True)
class ReferenceComparison:
    """How a baseline compares with the reference; tensors are in the order of computation.

    Nothing is compared where `reason` says why, or `samples` how the samples are not the planned ones. `perturbed` are
    its steps with each weight moved by one unit in the last place, None where it was not trained so; `float32_parts`
    are of cases in other types.
    """

    reason: str | None = written(None)
    samples: str | None = written(None)
    steps: tuple[ReferenceStep, ...] = written(())
    activations: tuple[TensorDifference, ...] = written(())
    gradients: tuple[TensorDifference, ...] = written(())
    weights: tuple[TensorDifference, ...] = written(())
    seconds: Amount = written(0.0)
    perturbed: tuple[tuple[ReferenceStep, ...], ...] | None = None
    float32_parts: tuple[Float32Part, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A model that was imported and exported: tensors that are not the same, and its logits' relative difference."""

    tensors: Count
    differing: tuple[str, ...]
    logits: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The library's configuration objects after training: fields by `model.`, `ddp.`, `optimizer.` and `scheduler.`.

    `values` are those unlike their default; `defaults` are of all fields, and of baselines alone.
    """

    values: Mapping[str, str]
    defaults: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a driver read from the objects that it had built; `libraries` are the files that ranks had mapped, by name.

    `unlisted` is what ranks imported, and no package of the lock lists. `hugging_face` is of an imported model alone,
    and memory of GPUs. Gradients are in the type that they are summed in, main weights are those that are updated.
    `cuda_graphs` counts the layers that replay one.
    """

    layer_spec: str
    attention: str
    attention_backend: str
    router_gemm: str
    normalization: str
    optimizer: str
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    gradient_buckets: Count
    hidden_dropout: float
    attention_dropout: float
    params_dtype: str
    parameters: Count
    trainable_parameters: Count
    samples_digest: str
    libraries: Mapping[str, tuple[str, ...]]
    unlisted: tuple[Finding, ...] = ()
    hugging_face: HuggingFace | None = None
    peak_memory_bytes: Count | None = None
    gradients_dtype: str | None = written(None)
    main_weights_dtype: str | None = written(None)
    loss_scale: float | None = written(None)
    cuda_graphs: Count = written(0)
    configuration: Configuration | None = written(None)


@dataclass(frozen=True, kw_only=True)
class CaseLine:
    """What happened to one case, the `repeat`th time; on `devices` of `nodes`, `started_seconds` after the run began.

    Devices are in the order of the ranks, and so are nodes, each with as many devices as the others; a part of a case
    has the first of them. `startup_seconds` passed until its first step began, None if none did. `fresh_processes`
    counts the rank processes that did not live before. `compute_seconds` are, by rank and step of the first part, those
    from the begin of a step to its first collective; none where the driver does not measure them. `restarted` is why it
    was begun a second time, through no fault of its ranks; all else is about the second time then.
    """

    schema: Schema = written(SCHEMA)
    type: Literal["case"] = written("case")
    case: str
    status: Status
    repeat: Positive = written(1)
    steps: tuple[Step, ...] = written(())
    seconds: Amount = written(0.0)
    startup_seconds: float | None = written(None)
    started_seconds: Amount = written(0.0)
    devices: tuple[Count, ...] = written(())
    nodes: tuple[Count, ...] = written((0,))
    fresh_processes: Count = written(0)
    weights: Weights | None = written(None)
    observed: Observed | None = written(None)
    reference: ReferenceComparison | None = written(None)
    gradients: tuple[Gradient, ...] | None = written(None)
    perturbed: tuple[Perturbed, ...] | None = written(None)
    failure: Failure | None = written(None)
    logs: tuple[str, ...] = written(())
    compute_seconds: tuple[tuple[Amount, ...], ...] = written(())
    restarted: str | None = written(None)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi prints it."""

    index: Count
    uuid: str
    name: str
    memory: str
    driver: str
    compute_capability: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it ran; `cuda` is what torch was built for, `nccl` what it has loaded.

    `variables` are those that change what CUDA, NCCL, gloo, oneDNN, torch, Transformer Engine, the loader of
    libraries or Python do.
    """

    cpu_model: str | None
    cpu_count: Positive
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    cuda: str | None
    nccl: str | None
    topology: str | None
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class EnvironmentGpu:
    """A GPU as the environment sees it."""

    name: str
    memory: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed: every distribution, and the files that modules were imported from.

    `cuda_redirects` are the symbols that were redirected to the CPU.
    """

    python: str
    platform: str
    cpu_count: Positive
    versions: Mapping[str, str]
    files: Mapping[str, str | None]
    device: Literal["cpu", "cuda"]
    gpus: tuple[EnvironmentGpu, ...]
    cuda_redirects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Image:
    """The file named with --image, hashed before the run, and the fingerprint of the image that it ran in."""

    file_digest: Digest
    file_bytes: Count
    fingerprint: Mapping[str, object] | None


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What runs on a node, and the differences from the lock.

    `host` is the node's name, Slurm's where it is under Slurm; `free_bytes` are of its folder for temporary files.
    """

    host: str
    environment: Environment
    environment_findings: tuple[Finding, ...]
    machine: Machine
    image: Image | None
    free_bytes: Count
    gpu_states: tuple[GpuState, ...]


@dataclass(frozen=True, kw_only=True)
class RunLine(NodeState):
    """What ran, and what runs on node 0; `smoke_digest` is of the zipapp, `devices` are of all nodes."""

    schema: Schema = written(SCHEMA)
    type: Literal["run"] = written("run")
    plan_digest: Digest
    nonce: str
    subject: Mapping[str, str]
    smoke_version: str
    smoke_digest: Digest | None
    started_at: Moment
    isolation: Literal["live", "process"]
    devices: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class NodeLine(NodeState):
    """What runs on another node than 0, written again where the run is resumed.

    `clock_ahead_seconds` is how far its time of day is ahead of node 0's, measured with at most this error.
    """

    schema: Schema = written(SCHEMA)
    type: Literal["node"] = written("node")
    node: Positive
    clock_ahead_seconds: float
    clock_error_seconds: Amount


@dataclass(frozen=True, kw_only=True)
class Point:
    """The bandwidth of a collective of so many bytes."""

    bytes: Positive
    seconds: Amount
    algorithm_gigabytes_per_second: Amount
    bus_gigabytes_per_second: Amount


@dataclass(frozen=True, kw_only=True)
class BandwidthLine:
    """A sweep of all_reduce (`points`), all_gather and all_to_all over all ranks of `nodes`.

    `transports` are those that NCCL's own log names, and `network_log` is what it says about how it chose its network.
    """

    schema: Schema = written(SCHEMA)
    type: Literal["bandwidth"] = written("bandwidth")
    sweep: Sweep = written("node")
    nodes: tuple[Count, ...] = written((0,))
    ranks: Positive
    backend: Literal["nccl", "gloo"] | None = written(None)
    transports: tuple[str, ...] | None = written(None)
    points: tuple[Point, ...] = written(())
    all_gather: tuple[Point, ...] = written(())
    all_to_all: tuple[Point, ...] = written(())
    network_log: tuple[str, ...] = written(())
    failure: Failure | None = written(None)


@dataclass(frozen=True, kw_only=True)
class ResumedLine:
    """Where an interrupted run was taken up again, with node 0 on `host`; `cut_bytes` are of half a last line."""

    schema: Schema = written(SCHEMA)
    type: Literal["resumed"] = written("resumed")
    at: Moment
    host: str
    cut_bytes: Count
    gpu_states: tuple[GpuState, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """The GPUs of another node than 0 after the cases."""

    node: Positive
    gpu_states: tuple[GpuState, ...]


@dataclass(frozen=True, kw_only=True)
class EndLine:
    """The end of a run, with how many cases there are and how many completed; `nodes` are those that were not lost."""

    schema: Schema = written(SCHEMA)
    type: Literal["end"] = written("end")
    cases: Count
    completed: Count
    finished_at: Moment
    gpu_states: tuple[GpuState, ...]
    nodes: tuple[NodeEnd, ...] = ()


Line = RunLine | NodeLine | CaseLine | BandwidthLine | ResumedLine | EndLine
KINDS: Mapping[str, type[Line]] = {
    "run": RunLine,
    "node": NodeLine,
    "case": CaseLine,
    "bandwidth": BandwidthLine,
    "resumed": ResumedLine,
    "end": EndLine,
}
