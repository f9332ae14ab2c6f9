"""What a model is made of, beyond its sizes: the axes of models, each declared once as those of cases are.

Tables of TOML, the plan, conditions of envs/conflicts and the grid of pairs come from it. Names are megatron-core's.
"""

from dataclasses import dataclass

from envbuild_smoke.plan.axes import MCORE, Positive, Size, axes, axis


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Parts of a model that recipes choose; the defaults are those of a model without such a table.

    Rotary positions are those of models with RMSNorm. `kv_channels` is the size of a head.
    """

    kv_channels: Size | None = axis(
        None, text="size of a head; the default is hidden_size / num_attention_heads", drivers=MCORE, least=16
    )
    qk_layernorm: bool = axis(False, text="a norm over each head's queries, and over its keys", drivers=MCORE)
    rotary_base: Positive = axis(10000.0, text="base of rotary positions", drivers=MCORE, least=500000.0)


PLAIN = Architecture()
ARCHITECTURE = axes(Architecture)
