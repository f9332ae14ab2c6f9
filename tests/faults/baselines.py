"""Faults that are there in one process too: every layout agrees with its baseline, and all of them are wrong."""

from __future__ import annotations

from typing import Any

from faults.cases import DATA, EXPERTS, ROUTER_LOSSES_PER_TOKEN, SEQUENCE
from faults.kinds import Case, Fault, Plant, Switch, edit
from faults.library import CORE


def baseline_fault(name: str, broken: str, plant: Plant, case: Case, text: str, **fields: Any) -> Fault:
    defaults = {"where": "library", "check": "reference", "at": "baseline"}
    return Fault(id=name, broken=broken, plant=plant, case=case, text=text, **{**defaults, **fields})


BASELINES = (
    baseline_fault(
        "norm-epsilon-of-its-own",
        "the last norm has its own epsilon and not the configuration's",
        edit(f"{CORE}/transformer/transformer_block.py", "eps=self.config.layernorm_epsilon", "eps=1e-4"),
        SEQUENCE,
        "decoder.final_layernorm (activation of the first micro batch)",
        quick=True,
    ),
    baseline_fault(
        "wider-than-configured",
        "MLPs are five times as wide as the model, not four times",
        edit(
            f"{CORE}/transformer/transformer_config.py",
            "self.ffn_hidden_size = 4 * self.hidden_size",
            "self.ffn_hidden_size = 5 * self.hidden_size",
        ),
        DATA,
        "decoder.layers.0.mlp.linear_fc1.weight has the shape",
    ),
    baseline_fault(
        "attention-scaled-by-the-head-size",
        "attention scores are divided by the head size and not by its square root",
        edit(
            f"{CORE}/transformer/dot_product_attention.py",
            "self.softmax_scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)",
            "self.softmax_scale = 1.0 / self.hidden_size_per_attention_head",
        ),
        DATA,
        "decoder.layers.0.self_attention.core_attention (activation of the first micro batch)",
    ),
    baseline_fault(
        "adam-epsilon-of-its-own",
        "Adam has its default epsilon and not the configuration's",
        edit(
            f"{CORE}/optimizer/__init__.py", '                "eps": config.adam_eps,', '                "eps": 1e-8,'
        ),
        DATA,
        "step 2: loss of the reference",
    ),
    baseline_fault(
        "router-loss-dropped",
        "with a loss per token the router's auxiliary loss is left out",
        edit(
            f"{CORE}/transformer/moe/router.py",
            "MoEAuxLossAutoScaler.apply(activation, aux_loss * num_tokens)",
            "MoEAuxLossAutoScaler.apply(activation, aux_loss * 0.0)",
        ),
        ROUTER_LOSSES_PER_TOKEN,
        "mlp.router",
    ),
    baseline_fault(
        "experts-weighed-by-all-scores",
        "the scores of a token's experts are a softmax over all experts, and not over those that it goes to",
        edit(f"{CORE}/transformer/moe/moe_utils.py", "        if use_pre_softmax:\n", "        if True:\n"),
        EXPERTS,
        "decoder.layers.0.mlp.router (activation of the first micro batch)",
    ),
    baseline_fault(
        "samples-in-another-order",
        "every rank reads the samples of a step backwards",
        Switch(name="samples-in-another-order"),
        DATA,
        "step 1 read the planned samples in another order",
        where="process",
        check="samples",
        quick=True,
    ),
)
