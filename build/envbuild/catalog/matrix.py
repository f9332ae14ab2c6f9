"""A matrix: the certification cases of a stack, how they train, and how closely they must agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, TypeVar

from pydantic import Discriminator, Field, Tag, model_validator

from envbuild.catalog.fields import Device, Name, TomlModel
from envbuild.catalog.model_spec import Dataset, ModelSpec

T = TypeVar("T")

# The tokens of text: a byte each, and with Megatron-Bridge one that ends a document.
TEXT_TOKENS = 257

# The upper bounds are far above any use. They refuse what TOML can write and no training can take, such as 10**400,
# which no float holds.
Size = Annotated[int, Field(ge=1, le=1024)]
Samples = Annotated[int, Field(gt=0, le=65536, description="samples")]
MicroSamples = Annotated[int, Field(gt=0, le=1024, description="samples")]
Step = Annotated[int, Field(gt=0, le=100_000)]
LearningRate = Annotated[float, Field(gt=0)]
WeightDecay = Annotated[float, Field(ge=0, le=10)]
ClipNorm = Annotated[float, Field(gt=0)]
BucketSize = Annotated[int, Field(gt=0, le=2**40, description="parameters")]


class Precision(str, Enum):
    """The number format a case trains in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class LossMask(str, Enum):
    """Which tokens count in the loss: all, or not a prefix of each sample, each of another length."""

    NONE = "none"
    # With equal masks each rank has as many tokens as the others, and dividing by one's own is right: Megatron-LM's
    # pull request 7513 is about a loss that only uneven masks show to be wrong.
    UNEVEN = "uneven"


class Finetune(str, Enum):
    """What a recipe fine-tunes of a Hugging Face model: nothing, all weights, or LoRA's adapters alone."""

    NONE = "none"
    SFT = "sft"
    LORA = "lora"


class RecipeAs(str, Enum):
    """A framework's recipe as people write it, or with the flags that cure what it is known to train wrongly."""

    PLAIN = "plain"
    CURED = "cured"


class Fp8Recipe(str, Enum):
    """How the scales of fp8 are found: from earlier micro batches, or of the values themselves, a tensor or a block."""

    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"


class AttentionBackend(str, Enum):
    """Which attention a case computes with: megatron-core's own, or one of Transformer Engine's."""

    LOCAL = "local"
    AUTO = "auto"
    FLASH = "flash"
    FUSED = "fused"
    UNFUSED = "unfused"


class Recompute(str, Enum):
    """Which activations are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Training(TomlModel):
    """How cases train: what decides the mathematics, and is the same for a case and its baseline."""

    steps: Step
    micro_batch_size: MicroSamples
    global_batch_size: Samples
    learning_rate: LearningRate
    clip_grad_norm: ClipNorm
    weight_decay: WeightDecay = Field(default=0.0, description="of Adam, decoupled; biases and norms have none")
    decoupled_lr: LearningRate | None = Field(
        default=None, description="of the embeddings and the output layer; without it learning_rate"
    )
    loss_mask: LossMask = Field(
        default=LossMask.NONE,
        description='"uneven": the loss leaves a prefix of each sample out, each of another length',
    )
    calculate_per_token_loss: bool = Field(
        default=False, description="the mean over the tokens of the global batch, and not over its micro batches"
    )
    packed: bool = Field(default=False, description="each sample is several documents, with attention inside of each")
    finetune: Finetune = Field(
        default=Finetune.NONE,
        description="Megatron-Bridge's recipe to fine-tune a Hugging Face model on prompts and answers",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)]

    @property
    def packs_pairs(self) -> bool:
        """Whether two samples, which the baseline has each in a row, are packed into one."""
        return self.packed and self.finetune is not Finetune.NONE

    @property
    def rows(self) -> int:
        """How many rows a global batch has, of one sample or of two that are packed."""
        return self.global_batch_size // 2 if self.packs_pairs else self.global_batch_size


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


class Dispatcher(str, Enum):
    """How tokens reach their experts."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


class LayoutSpec(TomlModel):
    """A layout, by the axes of :class:`CaseSpec`."""

    data: Size = 1
    tensor: Size = 1
    sequence: bool = False
    pipeline: Size = 1
    virtual_pipeline: Size = 1
    context: Size = 1
    expert: Size = 1
    expert_tensor: Size | None = None


class CaseSpec(LayoutSpec):
    """The axes in which a case differs from the baseline."""

    model: Name
    precision: Precision = Precision.FP32
    micro_batch_size: MicroSamples | None = None
    global_batch_size: Samples | None = None
    clip_grad_norm: ClipNorm | None = None
    weight_decay: WeightDecay | None = None
    decoupled_lr: LearningRate | None = None
    loss_mask: LossMask | None = None
    calculate_per_token_loss: bool | None = None
    packed: bool | None = None
    finetune: Finetune | None = None
    recipe: RecipeAs = RecipeAs.CURED
    fp8_recipe: Fp8Recipe | None = None
    # With its default, megatron-core 0.16.1 trains PP 2 x virtual 2 to other losses than the baseline; with True, and
    # batch_p2p_comm off, to the same digits (CPU, gloo).
    overlap_p2p_comm: bool | None = None
    attention_backend: AttentionBackend | None = None
    # Some bugs of released megatron-core show only with an axis from here on (envs/conflicts/): several buckets
    # (NVIDIA/Megatron-LM pull request 5077), several instances (3693), gathered logits (issue 7452).
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: BucketSize | None = None
    recompute: Recompute = Recompute.NONE
    parallel_output: bool = True
    num_distributed_optimizer_instances: Size = 1
    moe_token_dispatcher_type: Dispatcher | None = None
    moe_grouped_gemm: bool = False
    sequence_parallel_input_regather: bool | None = None
    resume_at: Step | None = None
    continue_in: LayoutSpec | None = None
    compare_weights: bool = False


def _tag(value: object) -> str:
    # A union that is chosen by form: pydantic would else report the errors of both kinds of value for one mistake.
    return "[many]" if isinstance(value, (list, tuple)) else "[one]"


# A value, or a list of values: a case for each.
OneOrMore = Annotated[
    Annotated[T, Tag("[one]")] | Annotated[tuple[T, ...], Field(min_length=1), Tag("[many]")],
    Discriminator(_tag),
]


OWN_BASELINE = "in the place of the matrix's; such cases have a baseline of their own"


class MatrixRow(TomlModel):
    """One row of a matrix: a case, or with lists of values one for each combination of them.

    What it does not name is as in the baseline.
    """

    model: OneOrMore[Name]
    precision: OneOrMore[Precision] = Precision.FP32
    data: OneOrMore[Size] = 1
    tensor: OneOrMore[Size] = 1
    sequence: OneOrMore[bool] = Field(default=False, description="sequence parallel, over the tensor-parallel ranks")
    pipeline: OneOrMore[Size] = 1
    virtual_pipeline: OneOrMore[Size] = Field(default=1, description="model chunks a pipeline stage")
    context: OneOrMore[Size] = 1
    expert: OneOrMore[Size] = Field(default=1, description="over the ranks of data x context")
    expert_tensor: OneOrMore[Size] | None = Field(
        default=None, description="ways that an expert is split, over the tensor-parallel ranks; without it tensor"
    )
    micro_batch_size: OneOrMore[MicroSamples] | None = Field(
        default=None, description="in the place of the matrix's, where the case may differ in it from its baseline"
    )
    global_batch_size: OneOrMore[Samples] | None = Field(default=None, description=OWN_BASELINE)
    clip_grad_norm: OneOrMore[ClipNorm] | None = Field(default=None, description=OWN_BASELINE)
    weight_decay: OneOrMore[WeightDecay] | None = Field(default=None, description=OWN_BASELINE)
    decoupled_lr: OneOrMore[LearningRate] | None = Field(default=None, description=OWN_BASELINE)
    loss_mask: OneOrMore[LossMask] | None = Field(default=None, description=OWN_BASELINE)
    calculate_per_token_loss: OneOrMore[bool] | None = Field(default=None, description=OWN_BASELINE)
    packed: OneOrMore[bool] | None = Field(
        default=None, description=f"{OWN_BASELINE}, but with finetune: the unpacked one"
    )
    finetune: OneOrMore[Finetune] | None = Field(default=None, description=OWN_BASELINE)
    recipe: OneOrMore[RecipeAs] = Field(
        default=RecipeAs.CURED,
        description="plain: the framework's recipe without the flags that cure what it is known to train wrongly",
    )
    fp8_recipe: OneOrMore[Fp8Recipe] | None = Field(
        default=None,
        description="without it blockwise or tensorwise, as the GPU can; such cases have their own baseline",
    )
    overlap_p2p_comm: OneOrMore[bool] | None = Field(
        default=None, description="megatron-core's flag; without it the setting that is right for the layout"
    )
    attention_backend: OneOrMore[AttentionBackend] | None = Field(
        default=None, description="without it local, or with Transformer Engine's layers auto"
    )
    distributed_optimizer: OneOrMore[bool] = False
    overlap_grad_reduce: OneOrMore[bool] = Field(default=False, description="reduce gradients during the backward pass")
    overlap_param_gather: OneOrMore[bool] = Field(default=False, description="gather weights during the forward pass")
    bucket_size: OneOrMore[BucketSize] | None = Field(
        default=None, description="the most parameters of a gradient bucket; without it megatron-core's default"
    )
    recompute: OneOrMore[Recompute] = Recompute.NONE
    parallel_output: OneOrMore[bool] = Field(
        default=True, description="false: logits are gathered from the tensor-parallel ranks before the loss"
    )
    num_distributed_optimizer_instances: OneOrMore[Size] = Field(
        default=1, description="how often the state of the sharded optimizer is there, each time over fewer ranks"
    )
    moe_token_dispatcher_type: OneOrMore[Dispatcher] | None = Field(
        default=None, description="without it alltoall on GPUs and allgather on CPUs"
    )
    moe_grouped_gemm: OneOrMore[bool] = Field(default=False, description="the experts of a rank in one matrix product")
    sequence_parallel_input_regather: OneOrMore[bool] | None = Field(
        default=None, description="Megatron-Bridge's flag of LoRA; without it on where there is sequence parallel"
    )
    resume_at: OneOrMore[Step] | None = Field(
        default=None, description="after this step everything is saved, torn down, built anew and loaded"
    )
    continue_in: OneOrMore[LayoutSpec] | None = Field(
        default=None,
        description="the layout that is built anew at resume_at, of as many processes; without it the same",
    )
    compare_weights: bool = Field(default=False, description="compare the final weights with the baseline's too")
    devices: tuple[Device, ...] | None = Field(
        default=None, min_length=1, description="left out on other devices; without it, all of the matrix's"
    )
    where_possible: bool = Field(
        default=False, description="left out, not refused, where the GPU or the environment's packages cannot do it"
    )

    def specs(self) -> Iterator[CaseSpec]:
        """A case for each combination of the values."""
        given = [name for name in CaseSpec.model_fields if name in self.model_fields_set]
        values = [value if isinstance(value := getattr(self, name), tuple) else (value,) for name in given]
        for chosen in itertools.product(*values):
            yield CaseSpec.model_validate(dict(zip(given, chosen, strict=True)))


class BandwidthSweep(TomlModel):
    """An all_reduce sweep after the cases."""

    # The sweep sends float32: 4 bytes are one element.
    sizes_bytes: tuple[Annotated[int, Field(ge=4, le=2**40)], ...] = Field(min_length=1)
    floor_gigabytes_per_second: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="of bus bandwidth, for the best of the sizes; without it there is none"
    )
    devices: tuple[Device, ...] = Field(default=(Device.CUDA,), min_length=1)


class Matrix(TomlModel):
    """The certification cases of a stack (``envs/matrices/*.toml``)."""

    summary: str
    devices: tuple[Device, ...] = Field(min_length=1, description="the devices these cases can run on")
    time_limit_seconds: Annotated[int, Field(gt=0, le=604_800, description="for each case")]
    models: dict[Name, ModelSpec] = Field(min_length=1)
    training: Training
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
            if model.dataset is Dataset.TEXT and (model.recipe is None or model.vocabulary_size < TEXT_TOKENS):
                needs = f"a recipe, and vocabulary_size of {TEXT_TOKENS} or more (bytes, and the end of a document)"
                raise ValueError(f"models.{name}: dataset text needs {needs}")
        return self
