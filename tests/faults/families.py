"""Faults in what families of models are made of: each is there in one process too, or in one layout of that part."""

from __future__ import annotations

from faults.baselines import baseline_fault
from faults.kinds import Case, edit
from faults.library import CORE, FINALIZE, library_fault

QWEN3 = Case(kind="qwen3", row={"tensor": 2, "sequence": True})
QWEN3_WHOLE = Case(kind="qwen3", row={"tensor": 2})
ATTENTION = f"{CORE}/transformer/attention.py"
GPT = f"{CORE}/models/gpt/gpt_model.py"

FAMILIES = (
    baseline_fault(
        "rotary-base-of-its-own",
        "rotary positions have base 10000 and not the configuration's",
        edit(
            f"{CORE}/models/common/embeddings/rotary_pos_embedding.py",
            "        self.inv_freq = 1.0 / (\n            rotary_base **",
            "        self.inv_freq = 1.0 / (\n            10000 **",
        ),
        QWEN3,
        "decoder.layers.0.self_attention.core_attention (activation of the first micro batch)",
        quick=True,
    ),
    baseline_fault(
        "keys-not-normalized",
        "queries are normalized and keys are not, whatever the configuration says",
        edit(ATTENTION, "            key = self.k_layernorm(key)\n", "            self.k_layernorm(key)\n"),
        QWEN3,
        "decoder.layers.0.self_attention.core_attention (activation of the first micro batch)",
    ),
    baseline_fault(
        "scores-scaled-by-hidden-size",
        "attention scores are scaled as if heads were as large as hidden_size / num_attention_heads",
        edit(
            f"{CORE}/transformer/dot_product_attention.py",
            "self.softmax_scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)",
            "self.softmax_scale = 1.0 / math.sqrt(config.hidden_size // config.num_attention_heads)",
        ),
        QWEN3,
        "decoder.layers.0.self_attention.core_attention (activation of the first micro batch)",
    ),
    library_fault(
        "norms-of-heads-not-reduced-in-tensor-parallel",
        "each tensor-parallel rank has the gradients of the norms over queries and keys of its own heads alone",
        edit(FINALIZE, 'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)', "False"),
        QWEN3_WHOLE,
        "parity-grad-norm",
    ),
)
