"""What a model is made of, beyond its sizes: the axes of models, each declared once as those of cases are.

Tables of TOML, the plan, conditions of envs/conflicts and the grid of pairs come from it. Names are megatron-core's.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from envbuild_smoke.plan.axes import MCORE, Positive, Size, axes, axis
from envbuild_smoke.plan.json_reader import up_to, within

RopeScaling = Literal["none", "llama3", "yarn"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
# quick_geglu is that of GPT-OSS, with `activation_func_clamp_value` and `glu_linear_offset`.
Activation = Literal["gelu", "swiglu", "squared_relu", "quick_geglu"]
Width = Annotated[int, up_to(65536)]
Tokens = Annotated[int, up_to(2**20)]
# What the router's auxiliary loss balances over: a micro batch or each sample. megatron-core's global_aux_loss is not
# among them: the loss of a micro batch counts those before it on all data-parallel ranks, and is another one with other
# ranks.
LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss"]
# What a router makes of its logits, and what it chooses experts by.
ScoreFunction = Literal["softmax", "sigmoid"]
Experts = Annotated[int, within("a whole number from 2 to 1024", ge=2, le=1024)]
Layers = Annotated[int, within("a whole number from 0 to 1024", ge=0, le=1024)]
Coefficient = Annotated[float, within("a number from 0 to 1", ge=0, le=1)]
Part = Annotated[float, within("a number above 0 and at most 1", gt=0, le=1)]
Factor = Annotated[float, within("a number from 1 to 1000", ge=1, le=1000)]
Offset = Annotated[float, within("a number from 0 to 10", ge=0, le=10)]
Deviation = Annotated[float, within("a number above 0 and at most 1", gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Parts of a model that recipes choose; the defaults are those of a model without such a table.

    Models with RMSNorm are as Llama where nothing else is said: rotary positions, a gated MLP with SiLU, no biases.
    """

    kv_channels: Size | None = axis(
        None, text="size of a head; the default is hidden_size / num_attention_heads", drivers=MCORE, least=16
    )
    qk_layernorm: bool = axis(False, text="a norm over each head's queries, and over its keys", drivers=MCORE)
    rotary_base: Positive = axis(10000.0, text="base of rotary positions", drivers=MCORE, least=500000.0)
    rotary_percent: Part = axis(1.0, text="part of a head that is rotated", drivers=MCORE, least=0.5)
    rope_scaling: RopeScaling = axis(
        "none",
        text="longer rotary positions: as Llama 3.1 from 8192 on, or YaRN from original_max_position_embeddings on",
        kinds={"llama3": "llama3", "yarn": "yarn"},
        drivers=MCORE,
    )
    rope_scaling_factor: Factor = axis(8.0, text="how much longer they are", drivers=MCORE)
    original_max_position_embeddings: Tokens = axis(4096, text="of YaRN", drivers=MCORE)
    share_embeddings_and_output_weights: bool = axis(
        True, text="the output layer has the weights of the token embedding", drivers=MCORE
    )
    window_size: Tokens | None = axis(
        None, text="tokens before it that a token sees, and itself; the default is all", drivers=MCORE, least=8
    )
    window_attn_skip_freq: Size | None = axis(
        None, text="each layer of a multiple of it has no window; the default is none", drivers=MCORE
    )
    softmax_type: SoftmaxType = axis(
        "vanilla",
        text="attention's softmax has one more score: 0, or a learnt one for each head (an attention sink)",
        kinds={"softmax_learnable": "learnable", "softmax_off_by_one": "off-by-one"},
        drivers=MCORE,
    )
    activation_func: Activation | None = axis(
        None,
        text="of MLPs and experts; the default is swiglu with RMSNorm and gelu without",
        kinds={"squared_relu": "squared_relu", "quick_geglu": "quick_geglu"},
        drivers=MCORE,
    )
    activation_func_clamp_value: Positive | None = axis(
        None, text="most that goes into quick_geglu", drivers=MCORE, least=7.0
    )
    glu_linear_offset: Offset = axis(0.0, text="added to what the gate multiplies", drivers=MCORE, least=1.0)
    add_bias_linear: bool | None = axis(
        None, text="biases on linear layers, experts and routers; the default is without RMSNorm", drivers=MCORE
    )
    init_method_std: Deviation = axis(
        0.02, text="standard deviation of weights as they are drawn", drivers=MCORE, least=0.05
    )

    mtp_num_layers: Size | None = axis(
        None, text="layers that predict the tokens after the next one", drivers=MCORE, least=1
    )
    mtp_loss_scaling_factor: Coefficient = axis(0.1, text="weight of their losses", drivers=MCORE)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-latent attention, in the place of that over groups of heads; sizes of a head but for the two ranks.

    Positions are rotary, with YaRN where the architecture has it; there the factor is on the scores, as in DeepSeek-V3.
    """

    q_lora_rank: Size
    kv_lora_rank: Size
    qk_head_dim: Size
    qk_pos_emb_head_dim: Size
    v_head_dim: Size


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts in the place of each layer's MLP; `router_topk` experts take each token.

    The losses of the router are added to the gradients, and not to the loss that is reported. Names are megatron-core's
    without `moe_`.
    """

    num_experts: Experts
    router_topk: Experts
    router_load_balancing_type: LoadBalancing = "none"
    aux_loss_coeff: Coefficient = 0.0
    z_loss_coeff: Coefficient = 0.0
    router_score_function: ScoreFunction = axis(
        "softmax", text="what a router makes of its logits", kinds={"router_sigmoid": "sigmoid"}, drivers=MCORE
    )
    router_enable_expert_bias: bool = axis(
        False,
        text="a bias for each expert, in the choice alone, moved after each step by its load",
        needs={"router_score_function": "sigmoid"},
        drivers=MCORE,
    )
    router_bias_update_rate: Coefficient = axis(1e-3, text="how far that bias is moved", drivers=MCORE)
    router_num_groups: Size | None = axis(
        None, text="groups of experts", needs={"router_group_topk": 1}, drivers=MCORE, least=2
    )
    router_group_topk: Size | None = axis(None, text="groups that a token's experts are in", drivers=MCORE)
    router_topk_scaling_factor: Positive | None = axis(
        None, text="factor of a token's experts", drivers=MCORE, least=2.5
    )
    shared_expert_intermediate_size: Width | None = axis(
        None, text="width of an expert that takes every token", drivers=MCORE, least=32
    )
    ffn_hidden_size: Width | None = axis(
        None, text="width of an expert; the default is 4 x hidden_size", drivers=MCORE, least=32
    )
    first_dense_layers: Layers = axis(0, text="layers without experts, before the others", drivers=MCORE, least=1)
    expert_capacity_factor: Positive | None = axis(
        None, text="tokens beyond this part of an equal share are dropped", drivers=MCORE, least=1.0
    )


PLAIN = Architecture()
ARCHITECTURE = axes(Architecture)
MOE = axes(Moe)
