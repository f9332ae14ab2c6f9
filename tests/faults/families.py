"""Faults in what families of models are made of: each is there in one process too, or in one layout of that part."""

from __future__ import annotations

from faults.baselines import baseline_fault
from faults.cases import DATA, TENSOR
from faults.kinds import Case, edit
from faults.library import CORE, FINALIZE, SCHEDULES, library_fault

LLAMA3 = Case(kind="llama3", row={"tensor": 2})
QWEN3 = Case(kind="qwen3", row={"tensor": 2, "sequence": True})
QWEN3_WHOLE = Case(kind="qwen3", row={"tensor": 2})
GPT_OSS = Case(kind="gpt-oss", row={"data": 2})
DEEPSEEK = Case(kind="deepseek-v3", row={"data": 2, "expert": 2})
DEEPSEEK_IN_STAGES = Case(kind="deepseek-v3", row={"pipeline": 2})
CAPACITY = Case(kind="capacity", row={"data": 2})
ATTENTION = f"{CORE}/transformer/attention.py"
DOT_PRODUCT = f"{CORE}/transformer/dot_product_attention.py"
MLP = f"{CORE}/transformer/mlp.py"
ROUTING = f"{CORE}/transformer/moe/moe_utils.py"
ROTARY = f"{CORE}/models/common/embeddings/rotary_pos_embedding.py"
# Multimodal positions have the same lines, after another argument.
WHOLE_HEAD = (
    "        use_cpu_initialization: bool = False,\n"
    "        cp_group: Optional[torch.distributed.ProcessGroup] = None,\n"
    "    ) -> None:\n        super().__init__()\n\n        dim = kv_channels\n"
    "        if rotary_percent < 1.0:\n            {}\n"
)
YARN = f"{CORE}/models/common/embeddings/yarn_rotary_pos_embedding.py"
GPT = f"{CORE}/models/gpt/gpt_model.py"
LATENT = f"{CORE}/transformer/multi_latent_attention.py"
CONTEXT_OF_LAYER = "decoder.layers.0.self_attention.core_attention (activation of the first micro batch)"
LAYER = "decoder.layers.0 (activation of the first micro batch)"
ROUTER = "decoder.layers.1.mlp.router (activation of the first micro batch)"

FAMILIES = (
    baseline_fault(
        "rotary-base-of-its-own",
        "rotary positions have base 10000 and not the configuration's",
        edit(
            ROTARY,
            "        self.inv_freq = 1.0 / (\n            rotary_base **",
            "        self.inv_freq = 1.0 / (\n            10000 **",
        ),
        QWEN3,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "keys-not-normalized",
        "queries are normalized and keys are not, whatever the configuration says",
        edit(ATTENTION, "            key = self.k_layernorm(key)\n", "            self.k_layernorm(key)\n"),
        QWEN3,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "scores-scaled-by-hidden-size",
        "attention scores are scaled as if heads were as large as hidden_size / num_attention_heads",
        edit(
            DOT_PRODUCT,
            "self.softmax_scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)",
            "self.softmax_scale = 1.0 / math.sqrt(config.hidden_size // config.num_attention_heads)",
        ),
        QWEN3,
        CONTEXT_OF_LAYER,
    ),
    library_fault(
        "norms-of-heads-not-reduced-in-tensor-parallel",
        "each tensor-parallel rank has the gradients of the norms over queries and keys of its own heads alone",
        edit(FINALIZE, 'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)', "False"),
        QWEN3_WHOLE,
        "parity-grad-norm",
    ),
    baseline_fault(
        "long-positions-left-out",
        "rotary positions are not stretched, whatever the configuration says",
        edit(ROTARY, "        if rope_scaling:\n", "        if False:\n"),
        LLAMA3,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "whole-heads-rotated",
        "a whole head is rotated, and not the part that the configuration says",
        edit(
            ROTARY,
            WHOLE_HEAD.format("dim = int(dim * rotary_percent)"),
            WHOLE_HEAD.format("pass"),
        ),
        LLAMA3,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "relu-not-squared",
        "the squared ReLU is a ReLU",
        edit(f"{CORE}/activations.py", "torch.pow(F.relu(x), 2)", "F.relu(x)"),
        LLAMA3,
        LAYER,
    ),
    baseline_fault(
        "window-off-by-one",
        "a token sees one token less than the window has",
        edit(
            f"{CORE}/transformer/utils.py",
            "diagonal=skv - sq - window_size[0])",
            "diagonal=skv - sq - window_size[0] + 1)",
        ),
        GPT_OSS,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "window-in-every-layer",
        "layers that are to see all tokens have a window too",
        edit(
            f"{CORE}/transformer/utils.py",
            "        return layer_number % window_attn_skip_freq != 0\n",
            "        return True\n",
        ),
        GPT_OSS,
        "decoder.layers.1.self_attention.core_attention (activation of the first micro batch)",
    ),
    baseline_fault(
        "sink-dropped",
        "attention has no sinks, whatever the configuration says",
        edit(
            DOT_PRODUCT,
            "            attention_scores, attention_mask, self.softmax_offset\n",
            "            attention_scores, attention_mask, None\n",
        ),
        GPT_OSS,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "yarn-not-concentrated",
        "YaRN's factor of queries and keys is left out",
        edit(YARN, "    return 0.1 * mscale * math.log(scale) + 1.0\n", "    return 1.0\n"),
        GPT_OSS,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "yarn-left-out",
        "YaRN stretches no positions",
        edit(
            YARN,
            "inv_freq = self.inv_freq_inter * (1 - inv_freq_mask) + self.inv_freq_extra * inv_freq_mask",
            "inv_freq = self.inv_freq_extra",
        ),
        GPT_OSS,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "gate-not-clamped",
        "what goes into the gate is not cut off",
        edit(MLP, "x_glu = x_glu.clamp(min=None, max=val)", "pass"),
        GPT_OSS,
        LAYER,
    ),
    baseline_fault(
        "gate-without-offset",
        "what the gate multiplies has no offset",
        edit(
            MLP,
            "                        x_linear + self.config.glu_linear_offset\n",
            "                        x_linear\n",
        ),
        GPT_OSS,
        LAYER,
    ),
    baseline_fault(
        "expert-bias-in-the-weights",
        "the bias that decides which experts take a token is also in how much they count",
        edit(
            ROUTING,
            "scores = torch.gather(scores, dim=1, index=top_indices)",
            "scores = torch.gather(scores_for_routing, dim=1, index=top_indices)",
        ),
        DEEPSEEK,
        "step 2: loss of the reference",
    ),
    baseline_fault(
        "expert-bias-never-moved",
        "the biases of experts stay at zero, whatever their load",
        edit(
            ROUTING,
            "expert_bias + torch.sign(offset) * expert_bias_update_rate",
            "expert_bias + 0 * torch.sign(offset)",
        ),
        DEEPSEEK,
        "step 2: loss of the reference",
    ),
    baseline_fault(
        "softmax-for-sigmoid",
        "scores of the router are a softmax where they are to be sigmoids",
        edit(
            ROUTING,
            "        scores = torch.sigmoid(logits.float())",
            "        scores = torch.softmax(logits.float(), -1)",
        ),
        DEEPSEEK,
        ROUTER,
    ),
    baseline_fault(
        "routed-experts-not-scaled",
        "the factor of a token's experts is left out",
        edit(ROUTING, "        probs = probs * scaling_factor\n", "        pass\n"),
        DEEPSEEK,
        ROUTER,
    ),
    baseline_fault(
        "groups-ignored",
        "a token's experts are the best of all, in whatever groups",
        edit(ROUTING, "        if group_topk:\n", "        if False:\n"),
        DEEPSEEK,
        ROUTER,
    ),
    library_fault(
        "shared-expert-dropped-on-one-rank",
        "one data-parallel rank goes on without the shared expert",
        edit(
            f"{CORE}/transformer/moe/shared_experts.py",
            "        output, _ = super().forward(hidden_states)\n",
            (
                "        output, _ = super().forward(hidden_states)\n"
                "        if torch.distributed.get_rank() == 1:\n"
                "            output = output * 0\n"
            ),
        ),
        DEEPSEEK,
        "parity-loss",
    ),
    baseline_fault(
        "further-tokens-not-scaled",
        "the losses of further tokens count as much as that of the next one",
        edit(
            GPT,
            "mtp_loss_scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers",
            "mtp_loss_scale = 1.0",
        ),
        DEEPSEEK,
        "(gradient of the first step)",
    ),
    library_fault(
        "further-tokens-for-each-micro-batch",
        "in a pipeline the losses of further tokens are not divided by the number of micro batches",
        edit(
            SCHEDULES,
            "            MTPLossAutoScaler.set_loss_scale(loss_scale / num_microbatches)\n",
            (
                "            MTPLossAutoScaler.set_loss_scale(\n"
                "                loss_scale / (1 if config.pipeline_model_parallel_size > 1 else num_microbatches)\n"
                "            )\n"
            ),
        ),
        DEEPSEEK_IN_STAGES,
        "parity-grad-norm",
    ),
    baseline_fault(
        "latents-not-normalized",
        "the latent of keys and values is not normalized",
        edit(
            LATENT,
            "        kv_compressed = self.kv_layernorm(kv_compressed)\n",
            "        self.kv_layernorm(kv_compressed)\n",
        ),
        DEEPSEEK,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "latent-scores-without-yarn",
        "scores of latent attention have not YaRN's factor",
        edit(
            LATENT,
            "self.softmax_scale = mscale * mscale / math.sqrt(self.q_head_dim)",
            "self.softmax_scale = 1 / math.sqrt(self.q_head_dim)",
        ),
        DEEPSEEK,
        CONTEXT_OF_LAYER,
    ),
    baseline_fault(
        "capacity-ignored",
        "experts take all tokens that come, whatever their capacity",
        edit(ROUTING, "    if expert_capacity > num_tokens:\n", "    if True:\n"),
        CAPACITY,
        "decoder.layers.0.mlp.router (activation of the first micro batch)",
    ),
    baseline_fault(
        "branches-not-scaled-as-drawn",
        "weights before a residual connection are drawn as large as all others",
        edit(f"{CORE}/utils.py", "    std = sigma / math.sqrt(multiplier * num_layers)\n", "    std = sigma\n"),
        DATA,
        "initial weights are not drawn as configured: decoder.layers.0.self_attention.linear_proj.weight",
        check="rank-exception",
    ),
    library_fault(
        "one-rank-draws-larger-weights",
        "one tensor-parallel rank draws its part of the weights twice as large",
        edit(
            f"{CORE}/tensor_parallel/layers.py",
            "    cpu_weight = torch.cat(my_weight_list, dim=partition_dim).to_dense()\n",
            "    cpu_weight = torch.cat(my_weight_list, dim=partition_dim).to_dense() * (1 + rank)\n",
        ),
        TENSOR,
        "rank-exception",
        text="initial weights are not drawn as configured: embedding.word_embeddings.weight",
    ),
)
