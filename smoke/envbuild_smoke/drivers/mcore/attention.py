"""Attention under context parallelism for the local layer spec; Megatron's own has none without Transformer Engine."""

import math
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from envbuild_smoke.drivers.samples import context_part


class LatentAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's own attention for multi-latent attention, which names sizes of keys and values that it takes not.

    The scores have their scale from what builds it, and `kv_channels` is the size of the values.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        for size in ("k_channels", "v_channels"):
            options.pop(size, None)
        super().__init__(*arguments, **options)


class ContextParallelAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention of this rank's part of the sequence to the whole of it.

    Keys and values are gathered from all context-parallel ranks; backwards, their gradients are summed and
    scattered to the ranks they came from. It saves no memory: it is there to train this layout on a CPU.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_arguments: Any, **_options: Any) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.attention_dropout = torch.nn.Dropout(config.attention_dropout)
        self._group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_arguments: Any, **_options: Any
    ) -> torch.Tensor:
        """Return the context, shape [own sequence, batch, heads x head size].

        `query` has shape [own sequence, batch, heads, head size]; key and value may have fewer heads (groups).
        """
        ways, rank = self._group.size(), self._group.rank()
        everywhere = torch.arange(query.size(0) * ways, device=query.device).unsqueeze(0)
        # A rank has two pieces that are not neighbours (`context_part`): gathered in the order of the ranks, they are
        # sorted into the order of the sequence.
        positions = [context_part(everywhere, part, ways).squeeze(0) for part in range(ways)]
        order = torch.cat(positions).argsort()
        groups = query.size(2) // key.size(2)
        # [batch, heads, sequence, head size]
        queries = query.permute(1, 2, 0, 3)
        keys, values = (self._whole(part, order).repeat_interleave(groups, dim=2) for part in (key, value))
        scores = queries @ keys.permute(1, 2, 3, 0) / math.sqrt(query.size(3))
        later = everywhere > positions[rank].unsqueeze(1)
        weights = self.attention_dropout(scores.masked_fill(later, -math.inf).softmax(dim=-1))
        context = weights @ values.permute(1, 2, 0, 3)
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)

    def _whole(self, part: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks, in the order of the sequence."""
        gathered = tensor_parallel.gather_from_sequence_parallel_region(part.contiguous(), group=self._group)
        whole: torch.Tensor = gathered[order]
        return whole
