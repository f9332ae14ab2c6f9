"""The plan as frozen values: what to train, how it is split over ranks, and what it is run for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

from envbuild_smoke.plan.architecture import PLAIN, Activation, Architecture, Latent, Moe
from envbuild_smoke.plan.axes import CaseParts, Driver, Positive, Settings
from envbuild_smoke.plan.json_reader import NOT_EMPTY, PlanError, at_least, matching, up_to

Device = Literal["cpu", "cuda"]
Kind = Literal["gpt", "mamba-hybrid"]
# A function of megatron.bridge.recipes, or a module of nemo.collections.llm with a `pretrain_recipe`.
BridgeRecipe = Literal["llama32_1b_pretrain_1gpu_h100_bf16_config", "qwen25_500m_pretrain_1gpu_h100_bf16_config"]
Recipe = Literal["qwen25_7b", "llama3_8b", BridgeRecipe]
# Random tokens, or `drivers/text.jsonl`.
Dataset = Literal["mock", "text"]
# As NCCL's log names networks, plugins by what they are (`envbuild_smoke.network.limits`).
Transport = Literal["NET/IB", "NET/gIB", "NET/FasTrak", "NET/GPUDirectTCPX", "NET/OFI", "NET/Socket"]
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
Normalization = Literal["LayerNorm", "RMSNorm"]
LayerSpec = Literal["local", "transformer-engine"]
Size = Annotated[int, at_least(1)]
# A case id becomes the name of a directory; with 120, suffixes stay below a file name's 255 bytes.
CaseId = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}",
        "1 to 120 letters, digits, '.', '_' or '-', the first a letter or digit (it names a directory)",
    ),
]
Nonce = Annotated[str, matching(r"[0-9a-f]{32}", "32 lower-case hexadecimal digits")]
# As compilers write it: 90, 90a, 103f.
Sm = Annotated[str, matching(r"[1-9][0-9]{1,2}[af]?", "a compute capability without its dot, such as '90' or '90a'")]
ModuleName = Annotated[str, matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the dotted name of a module")]
# The letters of megatron-core's `hybrid_override_pattern` (ssm/mamba_hybrid_layer_allocation).
HybridPattern = Annotated[
    str, matching(r"[M*-]{1,1024}", "a letter for each layer: M (Mamba), * (attention) or - (MLP)")
]


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """The Mamba layers of a hybrid model.

    `hybrid_override_pattern` has a letter for each layer: M for Mamba, * for attention, - for an MLP.
    """

    hybrid_override_pattern: HybridPattern
    state_dim: Size
    head_dim: Size
    num_groups: Size


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train; sizes in elements, `sequence_length` in tokens.

    `num_query_groups` equals `num_attention_heads` when attention is not grouped. `moe` is None in a model
    without experts, `mamba` is None in every model but those of kind mamba-hybrid. `recipe` is NeMo's
    or Megatron-Bridge's, cut down to these sizes, and None with driver mcore. With `dataset` text
    samples are read from files.
    """

    kind: Kind
    num_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_query_groups: Size
    sequence_length: Size
    vocabulary_size: Size
    normalization: Normalization
    layer_spec: LayerSpec
    moe: Moe | None
    mamba: Mamba | None
    mla: Latent | None = None
    norm_epsilon: Positive = 1e-5
    qkv_bias: bool = False
    architecture: Architecture = PLAIN
    recipe: Recipe | None = None
    dataset: Dataset = "mock"

    @property
    def is_llama(self) -> bool:
        """Whether it is built as Llama is where its architecture says nothing else."""
        return self.kind == "gpt" and self.normalization == "RMSNorm"

    @property
    def activation(self) -> Activation:
        """What is between the two linear layers of an MLP."""
        return self.architecture.activation_func or ("swiglu" if self.is_llama else "gelu")

    @property
    def has_bias(self) -> bool:
        """Whether linear layers have biases; experts have them where this is said."""
        said = self.architecture.add_bias_linear
        return not self.is_llama and self.moe is None if said is None else said


@dataclass(frozen=True, kw_only=True)
class Case(CaseParts):
    """One training run.

    Attributes:
        world_size: of its first part.
        baseline: None for a baseline, else the case whose initial weights are loaded.
        compare_weights: the final weights are compared with the baseline's final weights.
        compare_reference: the case, of one rank, is compared with the reference (`envbuild_smoke.reference`).
        perturbed_runs: how often the case, of one rank, trains again with its weights moved, to measure what rounding
            may do to its numbers.
        home_node: the node that alone runs the case, or where its first rank is; None: every node in its turn.
    """

    id: CaseId
    baseline: str | None
    driver: Driver
    model: str
    world_size: Size
    settings: Settings
    compare_weights: bool
    compare_reference: bool
    time_limit_seconds: Positive
    perturbed_runs: Annotated[int, at_least(0)]
    home_node: Annotated[int, at_least(0)] | None


@dataclass(frozen=True, kw_only=True)
class WantedGpu:
    """What every GPU used must be: of one of these compute capabilities ("90a")."""

    sm: Annotated[tuple[Sm, ...], NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class Floors:
    """The least bus bandwidth of each collective in GB/s, for the best of the sizes; None: any."""

    all_reduce: Positive | None = None
    all_gather: Positive | None = None
    all_to_all: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class BandwidthSweep:
    """Sweeps of collectives after the cases, over so many ranks on each node, and from two nodes on between them.

    Attributes:
        floor_gigabytes_per_second: of all_reduce and all_gather on a node, whatever the cluster; None: any.
        node_floors: the cluster's, on a node.
        network_floors: the cluster's, between nodes.
    """

    ranks: Size
    sizes_bytes: Annotated[tuple[Size, ...], NOT_EMPTY]
    floor_gigabytes_per_second: Positive | None
    node_floors: Floors = Floors()
    network_floors: Floors = Floors()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cases of a run, baselines first, and what they are run for.

    `provided_packages` are not of the lock: its base brings them.
    `gpu` is None exactly on the CPU. `nodes` is how many the run has, and `repeats` how often each case runs on each
    of them (`runs_of`). `content` is the plan as it was
    read, byte for byte; `digest` is "sha256:..." of it.
    """

    schema: Literal["envbuild.plan/4"]
    # New in every plan: envbuild rejects results whose nonce was used before.
    nonce: Nonce
    subject: Mapping[str, str]
    device: Device
    gpu: WantedGpu | None
    expected_versions: Mapping[str, str]
    expected_modules: tuple[ModuleName, ...]
    provided_packages: tuple[str, ...] = ()
    nodes: Annotated[int, up_to(1024)] = 1
    repeats: Size
    bandwidth: BandwidthSweep | None
    # What NCCL's log has to name between nodes; None where the cluster's file does not say, or there is one node.
    transport: Transport | None = None
    models: Mapping[str, Model]
    cases: Annotated[tuple[Case, ...], NOT_EMPTY]
    digest: str
    # Kept for the rank processes: they parse the same bytes that the digest in the results is of.
    content: bytes

    @cached_property
    def _by_id(self) -> Mapping[str, Case]:
        return {case.id: case for case in self.cases}

    def case(self, case_id: str) -> Case:
        """Return the case with this id; KeyError if there is none."""
        return self._by_id[case_id]

    def runs_of(self, case: Case) -> range:
        """Return the repeats of a case: one on its home node or on each, then as often as the plan says.

        A repeat begins on the node after that of the one before, so that a case has the repeats of its baseline there.
        """
        if case.home_node is None:
            return range(1, self.nodes * self.repeats + 1)
        return range(1 + case.home_node, self.nodes * self.repeats + 1, self.nodes)

    def nodes_of(self, case: Case, repeat: int) -> tuple[int, ...]:
        """Return the nodes of a repeat of a case, in the order of its ranks; a part over fewer has the first ones."""
        return tuple((repeat - 1 + index) % self.nodes for index in range(case.most_nodes))

    def measuring_repeat(self, case: Case, repeat: int) -> int:
        """Return which repeat of a baseline measures the bands of a repeat, and is compared with the reference.

        Of a baseline that every node runs it is the one on node 0: the others must have its numbers.
        """
        return repeat - (repeat - 1) % self.nodes + (case.home_node or 0)

    def run_of(self, case: Case, repeat: int) -> Case:
        """Return a case as a repeat of it trains: without what another repeat measures for it."""
        if repeat == self.measuring_repeat(case, repeat):
            return case
        return replace(case, compare_reference=False, perturbed_runs=0)

    def selection(self, only: tuple[str, ...]) -> tuple[Case, ...]:
        """Return the cases named in `only` and the baselines they need; all of them when it is empty."""
        if not only:
            return self.cases
        known = self._by_id
        unknown = sorted(set(only) - known.keys())
        if unknown:
            raise PlanError(f"--only names {', '.join(unknown)}; the plan has {', '.join(known)}")
        wanted = set(only)
        # Without its baseline a case has no weights to start from, so the baseline comes along.
        wanted.update(baseline for name in only if (baseline := known[name].baseline) is not None)
        return tuple(case for case in self.cases if case.id in wanted)
