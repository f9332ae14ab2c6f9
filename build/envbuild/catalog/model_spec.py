"""A small model for certification, in megatron-core's words."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field, StringConstraints

from envbuild.catalog.fields import TomlModel
from envbuild.catalog.tables import TableOf
from envbuild_smoke.plan.architecture import PLAIN, Architecture, Latent, Moe
from envbuild_smoke.plan.models import BridgeRecipe, Dataset, Kind, LayerSpec, Normalization, Recipe

# With a vocabulary of 1 every loss is 0, whatever is computed; this many leave something to compare.
LEAST_VOCABULARY = 32
Heads = Annotated[int, Field(gt=0, le=1024)]


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

    kind: Kind
    num_layers: Annotated[int, Field(gt=0, le=1024)]
    hidden_size: Annotated[int, Field(gt=0, le=65536)]
    num_attention_heads: Heads
    num_query_groups: Heads | None = Field(
        default=None, description="groups that share keys and values; without it each head has its own"
    )
    sequence_length: Annotated[int, Field(gt=0, le=131072, description="tokens a sample")]
    vocabulary_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=2**20)]
    normalization: Normalization = "LayerNorm"
    norm_epsilon: Annotated[float, Field(gt=0, le=0.1)] = 1e-5
    qkv_bias: bool = Field(
        default=False, description="a bias on queries, keys and values where other layers have none, as in Qwen2"
    )
    architecture: Annotated[Architecture, TableOf()] = PLAIN
    layer_spec: LayerSpec = "local"
    recipe: Recipe | None = Field(
        default=None,
        description="a pretrain recipe of NeMo or Megatron-Bridge, cut down to these sizes; for that driver alone",
    )
    dataset: Dataset = Field(
        default="mock",
        description="text: documents in files, by Megatron-Core's GPTDataset; a recipe's are a text, a token a byte",
    )
    moe: Annotated[Moe, TableOf()] | None = None
    mla: Annotated[Latent, TableOf()] | None = Field(default=None, description="attention of a model with RMSNorm")
    mamba: MambaLayers | None = Field(default=None, description="of kind mamba-hybrid, and only there")

    @property
    def query_groups(self) -> int:
        """How many groups of heads share keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The size of a head, rounded down where hidden_size does not divide by the heads."""
        return self.architecture.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def is_of_bridge(self) -> bool:
        """Whether its recipe is one of Megatron-Bridge's."""
        return self.recipe in get_args(BridgeRecipe)
