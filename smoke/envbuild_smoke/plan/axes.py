"""The axes of certification: the one table of what a case may differ in.

A field of Layout, Training, Settings or CaseAxes is an axis: its name, its type with its bounds, its default, and what
`axis` adds. Rows of a matrix, cases, words of IDs, the grid of pairs, the plan and docs/reference/certify.md come from
it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from envbuild_smoke.plan.json_reader import NOT_NEGATIVE, POSITIVE, matching, up_to, within

Driver = Literal["mcore", "nemo", "bridge"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
# All tokens count in the loss, or not a prefix of each sample, each of another length. With equal masks each rank has
# as many tokens as the others, and dividing by one's own is right: Megatron-LM's pull request 7513 is about a loss that
# only uneven masks show to be wrong.
LossMask = Literal["none", "uneven"]
# Of a Hugging Face model: nothing, all weights, or LoRA's adapters alone.
Finetune = Literal["none", "sft", "lora"]
# megatron-core's own, or one of Transformer Engine's.
AttentionBackend = Literal["local", "auto", "flash", "fused", "unfused"]
# Whole layers, or one of megatron-core's modules alone; "selective" is the core of attention, its default.
Recompute = Literal["none", "selective", "full", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]
RECOMPUTED_ALONE = ("selective", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")
# The library's own function compiled, or Transformer Engine's kernel.
CrossEntropyFusion = Literal["none", "native", "te"]
Dispatcher = Literal["allgather", "alltoall"]
CudaGraphs = Literal["none", "transformer_engine"]
# The scales of fp8: from earlier micro batches, or of the values themselves, a tensor or a block.
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise"]
# What becomes of the learning rate after its warm-up, and in the last steps of WSD (warm-up, stable, decay).
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
# The upper bounds are far above any use. They refuse what can be written and no training can take.
Size = Annotated[int, up_to(1024)]
Samples = Annotated[int, up_to(65536)]
MicroSamples = Annotated[int, up_to(1024)]
Step = Annotated[int, up_to(100_000)]
BucketSize = Annotated[int, up_to(2**40)]
Positive = Annotated[float, POSITIVE]
Stages = Annotated[str, matching(r"Et*(\|t*)*\|t*L", "E, layers t, stages between | and L, as Et|tt|t|L")]
NotNegative = Annotated[float, NOT_NEGATIVE]
Steps = Annotated[int, within("a whole number from 0 to 100000", ge=0, le=100_000)]
# Above a half: Adam's first moment would forget in a step.
Beta = Annotated[float, within("a number from 0.5 to 0.9999", ge=0.5, le=0.9999)]
WeightDecay = Annotated[float, within("a number from 0 to 10", ge=0, le=10)]
Seed = Annotated[int, within("a whole number from 0 to 4294967295", ge=0, le=2**32 - 1)]

ALL_DRIVERS: tuple[Driver, ...] = ("mcore", "nemo", "bridge")
MCORE: tuple[Driver, ...] = ("mcore",)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: the name and the default of its field, and what `axis` adds.

    Attributes:
        text: what it means, where its name does not say it.
        word: in the IDs of cases: with the value in braces, or by value; "" where no ID has one.
        own_baseline: cases with another value than the matrix's have a baseline of their own.
        derived: a row that leaves it out has what is right for its layout and model, and not the default.
        needs: other fields that the least row with it has.
        least: the least value that uses it, where that is not 2 of a size and the other of two.
        kinds: the values that are axes of their own in the grid of pairs, by the name there.
        drivers: those that set it.
    """

    name: str = ""
    default: object = None
    text: str = ""
    word: str | Mapping[object, str] = ""
    own_baseline: bool = False
    derived: bool = False
    needs: Mapping[str, object] = field(default_factory=dict)
    least: object = None
    kinds: Mapping[str, object] = field(default_factory=dict)
    drivers: tuple[Driver, ...] = ALL_DRIVERS

    def word_for(self, value: object) -> str:
        """Return its word in an ID; "" where there is none for this value."""
        if isinstance(self.word, str):
            # An ID is a file's name.
            return "" if value is None or value is False else self.word.format(value).replace("|", ".")
        return self.word.get(value, "")

    @property
    def grid(self) -> Mapping[str, Mapping[str, object]]:
        """The axes of the grid of pairs that it is, each with the least row."""
        if self.kinds:
            return {name: {self.name: value} for name, value in self.kinds.items()}
        least = self.least
        if least is None and isinstance(self.default, bool):
            least = not self.default
        elif least is None and self.default == 1:
            least = 2
        return {} if self.derived or least is None else {self.name: {**self.needs, self.name: least}}

    def grid_names(self, value: object) -> list[str]:
        """Return the axes of the grid that a case with this value uses."""
        if value == self.default:
            return []
        return [name for name in self.grid if not self.kinds or self.kinds[name] == value]


def axis(default: Any, **about: Any) -> Any:
    """Declare a field that is an axis; `about` are the attributes of Axis."""
    return field(default=default, metadata={"axis": Axis(default=default, **about)})


@cache
def axes(kind: type) -> tuple[Axis, ...]:
    """Return the axes among the fields of a class, in order."""
    return tuple(replace(each.metadata["axis"], name=each.name) for each in fields(kind) if each.metadata)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ways each kind of parallelism splits the work; 1 means not at all.

    `expert` shares the ranks of `data` and `context`, and takes none of its own.
    """

    data: Size = axis(1, text="data parallel", word="dp{}")
    tensor: Size = axis(1, text="tensor parallel", word="tp{}")
    sequence: bool = axis(
        False, text="sequence parallel, over the tensor-parallel ranks", word="sp", needs={"tensor": 2}
    )
    pipeline: Size = axis(1, text="pipeline parallel", word="pp{}")
    virtual_pipeline: Size = axis(1, text="model chunks a pipeline stage", word="vp{}", needs={"pipeline": 2})
    context: Size = axis(1, text="context parallel", word="cp{}")
    expert: Size = axis(
        1, text="expert parallel, over the ranks of data x context", word="ep{}", drivers=MCORE, needs={"data": 2}
    )
    expert_tensor: Size | None = axis(
        None,
        text="ways an expert is split, over the tensor-parallel ranks; the default is `tensor`",
        word="etp{}",
        drivers=MCORE,
        needs={"tensor": 2, "sequence": True},
        least=1,
    )

    num_layers_in_first_pipeline_stage: Size | None = axis(
        None, text="layers of the first stage; the default is as many as of others", word="first{}", drivers=MCORE
    )
    num_layers_in_last_pipeline_stage: Size | None = axis(
        None,
        text="layers of the last stage; the default is as many as of others",
        word="last{}",
        drivers=MCORE,
        needs={"pipeline": 4},
        least=1,
    )
    account_for_embedding_in_pipeline_split: bool = axis(
        False, text="the embedding counts as a layer of the first stage", word="emb", drivers=MCORE
    )
    account_for_loss_in_pipeline_split: bool = axis(
        False, text="the loss counts as a layer of the last stage", word="loss", drivers=MCORE
    )
    pipeline_model_parallel_layout: Stages | None = axis(
        None,
        text="what each stage has, as megatron-core writes it: `Et|tt|t|L` for embedding, layers and loss",
        word="by-{}",
        drivers=MCORE,
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that split something."""
        return tuple(each.name for each in axes(Layout) if getattr(self, each.name) != each.default)

    @property
    def label(self) -> str:
        """The layout in the field's short words: `tp2-pp2`; `baseline` for one rank."""
        used = [each for each in axes(Layout) if getattr(self, each.name) != each.default]
        return "-".join(each.word_for(getattr(self, each.name)) for each in used) or "baseline"

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train: what decides the mathematics, which is the same for a case and its baseline.

    Batch sizes are in samples, `global_batch_size` over all ranks together. Biases and norms have no `weight_decay`.
    With `finetune` each sample is a prompt, which the loss leaves out, and its answer; `packed` puts two in a row.
    """

    steps: Step
    micro_batch_size: MicroSamples = axis(MISSING, text="micro batch size", word="mb{}")
    global_batch_size: Samples = axis(MISSING, text="global batch size", word="gb{}", own_baseline=True)
    learning_rate: Positive
    clip_grad_norm: Positive = axis(MISSING, text="gradient clipping", word="clip{:g}", own_baseline=True)
    weight_decay: WeightDecay = axis(
        0.0, text="weight decay of Adam; biases and norms have none", word="wd{:g}", own_baseline=True, least=0.1
    )
    decoupled_lr: Positive | None = axis(
        None,
        text="learning rate of embeddings and output layer; the default is `learning_rate`",
        word="dlr{:g}",
        own_baseline=True,
        drivers=MCORE,
        least=0.0001,
    )
    start_weight_decay: WeightDecay | None = axis(
        None,
        text="weight decay of the first step, which grows to `weight_decay`; the default is that",
        word="swd{:g}",
        own_baseline=True,
        drivers=MCORE,
        needs={"weight_decay": 0.1, "weight_decay_incr_style": "cosine"},
        least=0.01,
    )
    weight_decay_incr_style: WeightDecayStyle = axis(
        "constant",
        text="how weight decay grows from `start_weight_decay`",
        word={"constant": "wds-constant", "linear": "wds-linear", "cosine": "wds-cosine"},
        own_baseline=True,
        drivers=MCORE,
    )
    adam_beta1: Beta = axis(0.9, text="of Adam's first moment", word="b1-{:g}", own_baseline=True, drivers=MCORE)
    adam_beta2: Beta = axis(
        0.999, text="of Adam's second moment", word="b2-{:g}", own_baseline=True, drivers=MCORE, least=0.95
    )
    # Some gradients are zero but for rounding: adding a constant to all keys changes no attention. Adam divides a
    # gradient by its own size, so with the usual 1e-8 such a bias walks off at random, on each layout elsewhere.
    adam_eps: Positive = axis(1e-5, text="Adam's epsilon", word="eps{:g}", own_baseline=True, drivers=MCORE)
    lr_decay_style: DecayStyle = axis(
        "constant",
        text="how the learning rate changes after its warm-up",
        word={
            "constant": "lr-constant",
            "linear": "lr-linear",
            "cosine": "lr-cosine",
            "inverse-square-root": "lr-isr",
            "WSD": "lr-wsd",
        },
        own_baseline=True,
        drivers=MCORE,
        least="cosine",
    )
    lr_warmup_iters: Steps = axis(
        0,
        text="steps in which the learning rate grows from `lr_warmup_init`",
        word="wu{}",
        own_baseline=True,
        drivers=MCORE,
    )
    lr_warmup_init: NotNegative = axis(
        0.0, text="learning rate of the first step of a warm-up", word="wui{:g}", own_baseline=True, drivers=MCORE
    )
    lr_decay_iters: Step | None = axis(
        None,
        text="step after which the learning rate is `min_lr`; the default is the last one",
        word="lrd{}",
        own_baseline=True,
        drivers=MCORE,
    )
    min_lr: NotNegative = axis(
        0.0, text="learning rate that a decay ends with", word="mlr{:g}", own_baseline=True, drivers=MCORE
    )
    lr_wsd_decay_iters: Step | None = axis(
        None, text="steps of the decay of WSD, the last ones", word="wsd{}", own_baseline=True, drivers=MCORE
    )
    lr_wsd_decay_style: WsdDecayStyle = axis(
        "exponential",
        text="how WSD decays",
        word={"exponential": "wsd-exp", "linear": "wsd-linear", "cosine": "wsd-cosine", "minus_sqrt": "wsd-sqrt"},
        own_baseline=True,
        drivers=MCORE,
    )
    loss_mask: LossMask = axis(
        "none",
        text="the loss leaves out a prefix of each sample, each of a different length",
        word="mask-{}",
        own_baseline=True,
        drivers=MCORE,
        least="uneven",
    )
    calculate_per_token_loss: bool = axis(
        False,
        text="the loss is the mean over all tokens of the global batch; otherwise over its micro batches",
        word={True: "ptl", False: "mbl"},
        own_baseline=True,
    )
    packed: bool = axis(
        False,
        text="several documents a sample, with attention within each; with `finetune`, two samples in a row",
        word={True: "packed", False: "whole"},
        own_baseline=True,
    )
    finetune: Finetune = axis(
        "none",
        text="fine-tuning of a Hugging Face model with Megatron-Bridge: of all weights, or of LoRA's adapters",
        word={"none": "pretrain", "sft": "sft", "lora": "lora"},
        own_baseline=True,
        drivers=("bridge",),
    )
    seed: Seed

    @property
    def decay_steps(self) -> int:
        """Number of steps after which the learning rate has decayed."""
        return self.lr_decay_iters or self.steps

    @property
    def packs_pairs(self) -> bool:
        """Whether two samples, which the baseline has each in a row, are packed into one."""
        return self.packed and self.finetune != "none"

    @property
    def rows(self) -> int:
        """Number of rows of a global batch, of one sample or of two that are packed."""
        return self.global_batch_size // 2 if self.packs_pairs else self.global_batch_size

    def microbatches(self, layout: Layout) -> int:
        """Return the number of micro batches each data-parallel rank runs in a step."""
        return self.rows // (self.micro_batch_size * layout.data)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of megatron-core that change how a case computes, and not what; a baseline has the defaults.

    `batch_p2p_comm` follows from `overlap_p2p_comm`: megatron-core's interleaved schedule refuses both at once.
    """

    # Some bugs of released megatron-core show only with one of these axes (envs/conflicts/): several buckets
    # (NVIDIA/Megatron-LM pull request 5077), several instances (3693), gathered logits (issue 7452).
    distributed_optimizer: bool = axis(
        False, text="optimizer sharded over the data-parallel ranks", word="do", needs={"data": 2}
    )
    num_distributed_optimizer_instances: Size = axis(
        1,
        text="copies of the sharded optimizer's state, each over fewer ranks",
        word="oi{}",
        drivers=MCORE,
        needs={"data": 2, "distributed_optimizer": True},
    )
    overlap_grad_reduce: bool = axis(
        False, text="reduce gradients during the backward pass", word="ogr", needs={"data": 2}
    )
    overlap_param_gather: bool = axis(
        False,
        text="gather weights during the forward pass",
        word="opg",
        needs={"data": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
    )
    bucket_size: BucketSize | None = axis(
        None,
        text="most parameters in a gradient bucket; the default is megatron-core's",
        word="bk{}",
        needs={"data": 2, "overlap_grad_reduce": True},
        least=1000,
    )
    average_in_collective: bool = axis(
        False,
        text="gradients are averaged as they are reduced, and not scaled before",
        word="aic",
        drivers=MCORE,
        needs={"data": 2},
    )
    grad_reduce_in_fp32: bool = axis(
        True,
        text="gradients are kept and reduced in float32, and not in the type of the weights",
        word={False: "grad-16bit"},
        own_baseline=True,
        drivers=MCORE,
        needs={"precision": "bf16"},
    )
    use_precision_aware_optimizer: bool = axis(
        False,
        text="Transformer Engine's Adam, with main weights and moments of its own",
        word="pao",
        drivers=MCORE,
        needs={"precision": "bf16", "data": 2, "distributed_optimizer": True},
    )
    loss_scale: Positive | None = axis(
        None,
        text="constant scale of the loss in fp16; without it, it begins with 4096 and doubles every two steps",
        word="ls{:g}",
        drivers=MCORE,
        needs={"precision": "fp16"},
        least=1024.0,
    )
    bias_activation_fusion: bool = axis(
        False, text="the gate, its bias and SiLU in one function", word="fuse-act", drivers=MCORE
    )
    bias_dropout_fusion: bool = axis(
        False, text="bias, dropout and residual in one function", word="fuse-add", drivers=MCORE
    )
    masked_softmax_fusion: bool = axis(
        False, text="scale, mask and softmax in one kernel, in 16 bits", word="fuse-softmax", drivers=MCORE
    )
    apply_rope_fusion: bool = axis(
        False, text="Transformer Engine's kernel of rotary positions", word="fuse-rope", drivers=MCORE
    )
    cross_entropy_fusion: CrossEntropyFusion = axis(
        "none",
        text="megatron-core's fused cross entropy, or Transformer Engine's",
        word={"native": "ce-native", "te": "ce-te"},
        drivers=MCORE,
        kinds={"cross_entropy_native": "native", "cross_entropy_te": "te"},
    )
    gradient_accumulation_fusion: bool = axis(
        False, text="Apex's kernel adds to the gradient of a weight as it is computed", word="fuse-wgrad", drivers=MCORE
    )
    cuda_graph_impl: CudaGraphs = axis(
        "none",
        text="layers are captured as CUDA graphs after two steps, by Transformer Engine",
        word={"transformer_engine": "graphs"},
        drivers=MCORE,
        kinds={"cuda_graphs": "transformer_engine"},
    )
    # With its default, megatron-core 0.16.1 trains PP 2 x virtual 2 to other losses than the baseline; with True, and
    # batch_p2p_comm off, to the same digits (CPU, gloo).
    overlap_p2p_comm: bool = axis(
        False,
        text="megatron-core's flag; the default is what is right for the layout",
        word={False: "bp2p"},
        derived=True,
    )
    batch_p2p_comm: bool
    recompute: Recompute = axis(
        "none",
        text="activations computed again in the backward pass",
        word="rc-{}",
        kinds={"recompute_selective": "selective", "recompute_full": "full", "recompute_modules": "mlp"},
    )
    attention_backend: AttentionBackend = axis(
        "auto",
        text="attention; the default is `local`, or `auto` with Transformer Engine's layers",
        word="attn-{}",
        derived=True,
        drivers=MCORE,
    )
    parallel_output: bool = axis(
        True,
        text="if false, logits are gathered from the tensor-parallel ranks before the loss",
        word={False: "gathered"},
        needs={"tensor": 2},
    )
    moe_token_dispatcher_type: Dispatcher | None = axis(
        None,
        text="how tokens reach experts; the default is `alltoall` on GPUs and `allgather` on CPUs",
        word="{}",
        drivers=MCORE,
        needs={"data": 2, "expert": 2},
        least="alltoall",
    )
    moe_grouped_gemm: bool = axis(
        False, text="the experts of a rank are one matrix product", word="grouped", drivers=MCORE
    )
    sequence_parallel_input_regather: bool = axis(
        False,
        text="Megatron-Bridge's flag for LoRA; the default is on with sequence parallelism",
        word={False: "gathered-norm"},
        derived=True,
        drivers=("bridge",),
    )
    fp8_recipe: Fp8Recipe | None = axis(
        None,
        text="how fp8 is scaled; the default is `blockwise` or `tensorwise`, as the GPU supports",
        word="{}",
        own_baseline=True,
        needs={"precision": "fp8"},
        least="tensorwise",
    )


@dataclass(frozen=True, kw_only=True)
class CaseAxes:
    """The axes of a case itself."""

    precision: Precision = axis(
        "fp32",
        text="number format: `fp32`, `bf16`, `fp16` or `fp8`",
        kinds={"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"},
    )
    nodes: Size = axis(1, text="nodes, with as many ranks on each", word="n{}", needs={"data": 2})
    resume_at: Step | None = axis(
        None, text="after this step everything is saved, and loaded by ranks that start anew", word="resume{}", least=1
    )
    continue_in: Layout | None = axis(
        None,
        text="the layout after `resume_at`, of any number of processes; the default is the same layout",
        word="in-{}",
        needs={"resume_at": 1},
        least={"data": 2},
    )
    continue_nodes: Size | None = axis(
        None,
        text="nodes after `resume_at`, more or fewer; the default is as many",
        word="on-n{}",
        needs={"data": 2, "resume_at": 1},
        least=2,
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The steps of a case, after one and until another, that one group of ranks trains; the first step is 1."""

    layout: Layout
    nodes: int
    after: int
    until: int

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on each of its nodes."""
        return self.layout.world_size // self.nodes


@dataclass(frozen=True, kw_only=True)
class CaseParts(CaseAxes):
    """A case and its parts: two where it is resumed, with a checkpoint between them, else one.

    Each part has ranks of its own: those of the second may be more or fewer, on more or fewer nodes.
    """

    layout: Layout
    training: Training

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they are trained."""
        last = self.training.steps
        if self.resume_at is None:
            return (Part(layout=self.layout, nodes=self.nodes, after=0, until=last),)
        layout, nodes = self.continue_in or self.layout, self.continue_nodes or self.nodes
        return (
            Part(layout=self.layout, nodes=self.nodes, after=0, until=self.resume_at),
            Part(layout=layout, nodes=nodes, after=self.resume_at, until=last),
        )

    @property
    def most_nodes(self) -> int:
        """Number of nodes that it needs."""
        return max(part.nodes for part in self.parts)

    @property
    def slots_on_node(self) -> int:
        """Number of devices that it needs on each of them."""
        return max(part.ranks_on_node for part in self.parts)

    @property
    def slots(self) -> int:
        """Number of devices that it needs: GPUs, or processes on the CPU."""
        return self.most_nodes * self.slots_on_node


TABLE = (*axes(Layout), *axes(CaseAxes), *axes(Training), *axes(Settings))
