"""A small model for certification, in megatron-core's words."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from envbuild.catalog.fields import TomlModel

# With a vocabulary of 1 every loss is 0, whatever is computed; this many leave something to compare.
LEAST_VOCABULARY = 32
Heads = Annotated[int, Field(gt=0, le=1024)]


class LayerSpec(str, Enum):
    """Whose layers a model is made of: megatron-core's own, or Transformer Engine's."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer-engine"


class Normalization(str, Enum):
    """Which norm a model has."""

    LAYER = "LayerNorm"
    RMS = "RMSNorm"


class LoadBalancing(str, Enum):
    """What the router's auxiliary loss balances over: a micro batch or each sample.

    megatron-core's global_aux_loss is not among them: the loss of a micro batch counts those before it on all
    data-parallel ranks, and is another one with other ranks.
    """

    NONE = "none"
    AUX_LOSS = "aux_loss"
    SEQ_AUX_LOSS = "seq_aux_loss"


class Recipe(str, Enum):
    """A pretrain recipe of NeMo, or of Megatron-Bridge."""

    QWEN25_7B = "qwen25_7b"
    LLAMA3_8B = "llama3_8b"
    BRIDGE_LLAMA32_1B = "llama32_1b_pretrain_1gpu_h100_bf16_config"
    BRIDGE_QWEN25_500M = "qwen25_500m_pretrain_1gpu_h100_bf16_config"

    @property
    def is_of_bridge(self) -> bool:
        """Whether it is one of Megatron-Bridge's."""
        return self.name.startswith("BRIDGE_")


class Dataset(str, Enum):
    """What a recipe trains on: random tokens, or the runner's own text through Megatron-Core's datasets."""

    MOCK = "mock"
    TEXT = "text"


class Experts(TomlModel):
    """A mixture of experts in the place of each layer's MLP."""

    num_experts: Annotated[int, Field(ge=2, le=1024)]
    router_topk: Annotated[int, Field(ge=2, le=1024, description="experts that take each token")]
    router_load_balancing_type: LoadBalancing = LoadBalancing.NONE
    aux_loss_coeff: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="of the auxiliary loss")
    z_loss_coeff: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="of the router's z loss")


class MambaLayers(TomlModel):
    """The Mamba layers of a hybrid model."""

    hybrid_override_pattern: Annotated[str, StringConstraints(pattern=r"^[M*-]{1,1024}$")] = Field(
        description="a letter for each layer: M for Mamba, * for attention, - for an MLP"
    )
    state_dim: Annotated[int, Field(gt=0, le=1024)]
    head_dim: Annotated[int, Field(gt=0, le=1024)]
    num_groups: Annotated[int, Field(gt=0, le=1024)]


class ModelSpec(TomlModel):
    """A small model for certification, in megatron-core's words."""

    kind: Literal["gpt", "mamba-hybrid"]
    num_layers: Annotated[int, Field(gt=0, le=1024)]
    hidden_size: Annotated[int, Field(gt=0, le=65536)]
    num_attention_heads: Heads
    num_query_groups: Heads | None = Field(
        default=None, description="groups that share keys and values; without it each head has its own"
    )
    sequence_length: Annotated[int, Field(gt=0, le=131072, description="tokens a sample")]
    vocabulary_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=2**20)]
    normalization: Normalization = Normalization.LAYER
    norm_epsilon: Annotated[float, Field(gt=0, le=0.1)] = 1e-5
    qkv_bias: bool = Field(
        default=False, description="a bias on queries, keys and values where other layers have none, as in Qwen2"
    )
    layer_spec: LayerSpec = LayerSpec.LOCAL
    recipe: Recipe | None = Field(
        default=None,
        description="a pretrain recipe of NeMo or Megatron-Bridge, cut down to these sizes; for that driver alone",
    )
    dataset: Dataset = Field(
        default=Dataset.MOCK,
        description="text: the runner's own, a token a byte, through Megatron-Core's datasets; with a recipe alone",
    )
    moe: Experts | None = None
    mamba: MambaLayers | None = Field(default=None, description="of kind mamba-hybrid, and only there")

    @property
    def query_groups(self) -> int:
        """How many groups of heads share keys and values."""
        return self.num_query_groups or self.num_attention_heads
