"""Faults that are there in one process too: every layout agrees with its baseline, and all of them are wrong."""

from __future__ import annotations

from functools import partial

from faults.cases import DATA, EXPERTS, ROUTER_LOSSES_PER_TOKEN, SEQUENCE
from faults.kinds import Edit, Fault, Switch
from faults.library import CORE

baseline_fault = partial(Fault, where="library", check="reference", at="baseline")

BASELINES = (
    baseline_fault(
        id="norm-epsilon-of-its-own",
        broken="the last norm has its own epsilon and not the configuration's",
        plant=Edit(
            file=f"{CORE}/transformer/transformer_block.py",
            changes=(("eps=self.config.layernorm_epsilon", "eps=1e-4"),),
        ),
        case=SEQUENCE,
        text="decoder.final_layernorm (activation of the first micro batch)",
        quick=True,
    ),
    baseline_fault(
        id="attention-scaled-by-the-head-size",
        broken="attention scores are divided by the head size and not by its square root",
        plant=Edit(
            file=f"{CORE}/transformer/dot_product_attention.py",
            changes=(
                (
                    "self.softmax_scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)",
                    "self.softmax_scale = 1.0 / self.hidden_size_per_attention_head",
                ),
            ),
        ),
        case=DATA,
        text="decoder.layers.0.self_attention.core_attention (activation of the first micro batch)",
    ),
    baseline_fault(
        id="adam-epsilon-of-its-own",
        broken="Adam has its default epsilon and not the configuration's",
        plant=Edit(
            file=f"{CORE}/optimizer/__init__.py",
            changes=(('                "eps": config.adam_eps,', '                "eps": 1e-8,'),),
        ),
        case=DATA,
        text="step 2: loss of the reference",
    ),
    baseline_fault(
        id="router-loss-dropped",
        broken="with a loss per token the router's auxiliary loss is left out",
        plant=Edit(
            file=f"{CORE}/transformer/moe/router.py",
            changes=(
                (
                    "MoEAuxLossAutoScaler.apply(activation, aux_loss * num_tokens)",
                    "MoEAuxLossAutoScaler.apply(activation, aux_loss * 0.0)",
                ),
            ),
        ),
        case=ROUTER_LOSSES_PER_TOKEN,
        text="mlp.router",
    ),
    baseline_fault(
        id="experts-weighed-by-all-scores",
        broken="the scores of a token's experts are a softmax over all experts, and not over those that it goes to",
        plant=Edit(
            file=f"{CORE}/transformer/moe/moe_utils.py",
            changes=(("        if use_pre_softmax:\n", "        if True:\n"),),
        ),
        case=EXPERTS,
        text="decoder.layers.0.mlp.router (activation of the first micro batch)",
    ),
    baseline_fault(
        id="samples-in-another-order",
        broken="every rank reads the samples of a step backwards",
        where="process",
        plant=Switch(name="samples-in-another-order"),
        case=DATA,
        check="samples",
        text="step 1 read the planned samples in another order",
        quick=True,
    ),
)
