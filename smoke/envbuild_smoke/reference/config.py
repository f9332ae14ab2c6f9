"""What a reference computes: plain values, none of a library's."""

from dataclasses import dataclass
from typing import Literal

from envbuild_smoke.reference.positions import RotaryConfig

Activation = Literal["gelu", "swiglu", "squared_relu", "quick_geglu"]
Positions = Literal["learned", "rotary", "none"]


_PLAIN_ROTARY = RotaryConfig()


class NotComparedError(Exception):
    """The reference cannot compute this model, or cannot read its weights."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the place of the MLP; `top_k` of `count` take each token.

    `bias` is on their linear layers and on the router. `softmax_first` takes the softmax over all experts and not over
    those that were chosen. The others are the coefficients of the auxiliary losses: of a micro batch, of a sequence,
    and of the router's logits.

    With `sigmoid` a token's experts have their scores' part of the sum, times `factor`, and each expert a bias in the
    choice, moved by `bias_rate` after each step. `groups_top_k` of `groups` have all experts of a token. Of an expert's
    tokens those with the lowest scores are dropped beyond `capacity` times an equal share. A `shared` expert takes all
    tokens. `dense_layers` come first, without experts.
    """

    count: int
    top_k: int
    bias: bool = False
    softmax_first: bool = False
    auxiliary: float = 0.0
    sequence_auxiliary: float = 0.0
    z: float = 0.0
    sigmoid: bool = False
    bias_rate: "float | None" = None
    groups: "int | None" = None
    groups_top_k: "int | None" = None
    factor: float = 1.0
    shared: bool = False
    dense_layers: int = 0
    capacity: "float | None" = None

    @property
    def is_of_micro_batches(self) -> bool:
        """Whether what experts compute depends on which samples are in a micro batch together."""
        return self.capacity is not None or any((self.auxiliary, self.sequence_auxiliary, self.z))


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-latent attention: the rank of keys and values, and of a head what is not rotated and what is."""

    rank: int
    size: int
    rotated: int


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """The sizes of a Mamba layer; `norm_epsilon` is that of the norm inside of it."""

    state_size: int
    head_size: int
    groups: int
    norm_epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder. `layers` has a letter for each: T (attention and MLP), * (attention), - (MLP), M (Mamba).

    `bias` is on all linear layers but those of Mamba and of experts, which have `experts.bias`; `qkv_bias` on the
    projection to queries, keys and values. With `tied` the output has the weights of the token embedding. `qk_norm` is
    a norm over each head's queries and keys, of the kind of all others. A token sees `window` tokens before it, but in
    layers of a multiple of `windowless`. `sinks` are one more score in each softmax. What goes into a gated MLP is cut
    off at `clamp`, and `linear_offset` is added to what the gate multiplies. `predicted` layers predict one token more
    each; their losses count `predicted_weight` together.
    """

    layers: str
    hidden_size: int
    heads: int
    query_groups: int
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float = 1e-5
    positions: Positions
    rotary: RotaryConfig = _PLAIN_ROTARY
    qk_norm: bool = False
    window: "int | None" = None
    windowless: "int | None" = None
    sinks: "Literal['zero', 'learnt'] | None" = None
    activation: Activation
    clamp: "float | None" = None
    linear_offset: float = 0.0
    bias: bool
    qkv_bias: bool
    tied: bool = True
    experts: "ExpertsConfig | None" = None
    latent: "LatentConfig | None" = None
    predicted: int = 0
    predicted_weight: float = 0.0
    mamba: "MambaConfig | None" = None


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How learning rate and weight decay change over `steps`; the default is not at all.

    For `warmup` steps the learning rate grows from `first`; until step `decay` it falls to `least`, with style WSD in
    the last `wsd_decay` of them. The weight decay begins with `first_weight_decay`, where that is not None.
    """

    steps: int = 1
    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    warmup: int = 0
    first: float = 0.0
    decay: int = 1
    least: float = 0.0
    wsd_decay: int = 1
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    first_weight_decay: "float | None" = None
    weight_decay_style: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, on gradients clipped to the norm `clip_norm`.

    Learning rates and weight decay are the largest ones of `schedule`.
    Tensors of one dimension (biases, norms) have no weight decay. The token embedding and the output have
    `embedding_learning_rate` where it is not None. With `per_token_loss` the gradient is that of the mean over all
    tokens of a step; otherwise of the mean over its micro batches.
    """

    learning_rate: float
    embedding_learning_rate: "float | None" = None
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float
    per_token_loss: bool = False
    schedule: ScheduleConfig = ScheduleConfig()
