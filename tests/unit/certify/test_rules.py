"""Each rule of the layouts and settings: what breaks it, and how the message names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.rows import CAPABILITIES, EXPERTS, MAMBA, TRAINING, rows, values_of
from hypothesis import HealthCheck, given, settings

from envbuild.catalog.model_spec import MambaLayers, ModelSpec
from envbuild.certify.cases.case import Capabilities, ResolvedRow
from envbuild.certify.cases.rules import broken_rules, missing_capabilities
from envbuild_smoke.plan.architecture import Moe

CPU, A100, H200, B200 = CAPABILITIES
MODEL = {
    "kind": "gpt",
    "num_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "sequence_length": 64,
    "vocabulary_size": 512,
    "normalization": "RMSNorm",
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
# Fields of the models that are tables of their own.
TABLES = {"moe": (vars(Moe(**EXPERTS)), EXPERTS), "mamba": (MambaLayers.model_fields, MAMBA)}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "te": {"layer_spec": "transformer-engine"},
    "moe": {"moe": {}},
    "mamba": {"kind": "mamba-hybrid", "layer_spec": "transformer-engine", "mamba": {}},
}


def row(kind: str, capabilities: Capabilities = CPU, **changes: Any) -> ResolvedRow:
    """A row that breaks no rule, with changes: axes, of ModelSpec, or of a table of it."""
    model = MODEL | KINDS[kind]
    for name, (names, usual) in TABLES.items():
        if name in model:
            own = {field: changes.pop(field) for field in list(changes) if field in names}
            model[name] = usual | own
    model |= {field: changes.pop(field) for field in list(changes) if field in ModelSpec.model_fields}
    return ResolvedRow(
        values=values_of(**changes),
        model=ModelSpec.model_validate(model),
        matrix_training=TRAINING,
        capabilities=capabilities,
    )


FINETUNED = {
    "recipe": "qwen25_500m_pretrain_1gpu_h100_bf16_config",
    "finetune": "sft",
    "calculate_per_token_loss": True,
    "precision": "bf16",
}


def messages(row: ResolvedRow) -> list[str]:
    return [*broken_rules(row), *missing_capabilities(row)]


@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=["cpu", "a100", "h200", "b200"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt", {}),
        ("gpt", {"data": 2, "tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2}),
        ("gpt", {"pipeline": 4, "virtual_pipeline": 2, "overlap_p2p_comm": False}),
        # It trains, and with some versions it is wrong: envs/conflicts has those.
        ("gpt", {"pipeline": 2, "virtual_pipeline": 2, "overlap_p2p_comm": False}),
        ("gpt", {"num_query_groups": 2, "tensor": 2, "recompute": "full", "resume_at": 4}),
        ("gpt", {"data": 2, "overlap_grad_reduce": True, "bucket_size": 1000, "loss_mask": "uneven"}),
        ("moe", {"data": 4, "expert": 4, "distributed_optimizer": True}),
        ("moe", {"tensor": 2, "sequence": True, "recompute": "selective"}),
        ("moe", {"tensor": 2, "sequence": True, "expert_tensor": 1, "router_load_balancing_type": "seq_aux_loss"}),
        ("gpt", {"data": 2, "tensor": 2, "resume_at": 2, "continue_in": {"data": 4}}),
        ("te", {"context": 4, "precision": "bf16", "attention_backend": "fused"}),
        ("te", {"attention_backend": "unfused"}),
        ("te", {"precision": "bf16", "attention_backend": "flash"}),
        ("te", {"precision": "fp8", "tensor": 4, "sequence": True}),
        ("te", {"precision": "bf16", "packed": True, "context": 2, "micro_batch_size": 1}),
        ("te", FINETUNED),
        ("te", FINETUNED | {"finetune": "lora", "packed": True, "data": 8, "micro_batch_size": 1}),
        ("te", {"precision": "bf16", "moe": EXPERTS, "moe_grouped_gemm": True, "data": 2, "expert": 2}),
        ("mamba", {"tensor": 2, "context": 2, "precision": "bf16", "recompute": "selective"}),
        ("mamba", {"pipeline": 4, "precision": "fp8", "data": 2}),
    ],
)
def test_row_that_breaks_no_rule(kind, changes, capabilities):
    fitting = row(kind, capabilities, **changes)
    assert broken_rules(fitting) == []
    device_fits = KINDS[kind].get("layer_spec") is None or capabilities is not CPU
    possible = device_fits and not (changes.get("precision") == "fp8" and capabilities is A100)
    assert bool(missing_capabilities(fitting)) is not possible


@pytest.mark.parametrize(
    ("kind", "capabilities", "changes", "text"),
    [
        # -- sizes that must divide
        ("gpt", CPU, {"hidden_size": 130}, "hidden_size 130 must be a multiple of num_attention_heads 4"),
        ("gpt", CPU, {"num_query_groups": 3}, "num_attention_heads 4 must be a multiple of num_query_groups 3"),
        ("gpt", CPU, {"pipeline": 3}, "num_layers 8 must be a multiple of pipeline x virtual_pipeline = 3"),
        ("gpt", CPU, {"tensor": 3, "vocabulary_size": 513}, "num_attention_heads 4 must be a multiple of tensor = 3"),
        ("gpt", CPU, {"tensor": 4, "vocabulary_size": 514}, "vocabulary_size 514 must be a multiple of tensor = 4"),
        ("gpt", CPU, {"tensor": 2, "num_query_groups": 1}, "num_query_groups 1 must be a multiple of tensor = 2"),
        ("gpt", CPU, {"data": 3}, "global_batch_size 16 must be a multiple of micro_batch_size x data = 6"),
        ("gpt", CPU, {"micro_batch_size": 3}, "global_batch_size 16 must be a multiple of micro_batch_size x data = 3"),
        ("gpt", CPU, {"hidden_size": 48}, "hidden_size / num_attention_heads is 12 and must be a multiple of 8"),
        ("te", H200, {"context": 2, "sequence_length": 66, "precision": "bf16"}, "be a multiple of 2 x context = 4"),
        ("gpt", CPU, {"tensor": 4, "sequence": True, "sequence_length": 66}, "66 must be a multiple of tensor = 4"),
        (
            "te",
            H200,
            {"tensor": 4, "context": 2, "sequence": True, "sequence_length": 68, "precision": "bf16"},
            "sequence_length / context 34 must be a multiple of tensor = 4",
        ),
        ("gpt", CPU, {"pipeline": 2, "virtual_pipeline": 2, "global_batch_size": 6}, "be a multiple of pipeline = 2"),
        # -- what layouts need
        ("gpt", CPU, {"virtual_pipeline": 2}, "virtual_pipeline needs pipeline > 1"),
        ("gpt", CPU, {"pipeline": 2, "overlap_p2p_comm": True}, "with pipeline > 1 needs virtual_pipeline > 1"),
        ("gpt", CPU, {"sequence": True}, "sequence needs tensor > 1"),
        (
            "gpt",
            CPU,
            {"tensor": 2, "sequence": True, "normalization": "LayerNorm"},
            'sequence with layer_spec local needs normalization "RMSNorm"',
        ),
        ("gpt", H200, {"context": 2, "precision": "bf16"}, "context > 1 needs layer_spec transformer-engine"),
        ("te", H200, {"context": 2}, "context > 1 needs precision bf16 or fp8"),
        ("te", H200, {"context": 2, "precision": "bf16", "attention_backend": "unfused"}, "other than unfused"),
        ("gpt", CPU, {"distributed_optimizer": True}, "distributed_optimizer needs data x context > 1"),
        # -- settings
        ("te", H200, {"attention_backend": "local"}, "attention_backend = local needs layer_spec local"),
        ("gpt", CPU, {"attention_backend": "unfused"}, "= unfused needs layer_spec transformer-engine"),
        ("te", H200, {"attention_backend": "fused"}, "attention_backend = fused needs precision bf16 or fp8"),
        ("te", H200, {"attention_backend": "flash"}, "attention_backend = flash needs precision bf16 or fp8"),
        ("gpt", H200, {"precision": "fp8"}, "precision = fp8 needs layer_spec transformer-engine"),
        ("gpt", CPU, {"resume_at": 5}, "resume_at 5 must be less than steps 5"),
        ("gpt", CPU, {"overlap_grad_reduce": True}, "overlap_grad_reduce needs data x context > 1"),
        (
            "gpt",
            CPU,
            {"data": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
            "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce",
        ),
        (
            "gpt",
            CPU,
            {"data": 4, "num_distributed_optimizer_instances": 2},
            "num_distributed_optimizer_instances > 1 needs distributed_optimizer",
        ),
        (
            "gpt",
            CPU,
            {"data": 2, "distributed_optimizer": True, "num_distributed_optimizer_instances": 4},
            "data x context = 2 must be a multiple of num_distributed_optimizer_instances = 4",
        ),
        (
            "gpt",
            CPU,
            {"data": 2, "distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            "num_distributed_optimizer_instances > 1 needs device cuda (torch.cuda.Stream requires CUDA support)",
        ),
        ("gpt", CPU, {"data": 2, "bucket_size": 9}, "bucket_size needs overlap_grad_reduce"),
        (
            "gpt",
            CPU,
            {"micro_batch_size": 4, "loss_mask": "uneven"},
            "loss_mask = uneven with another micro_batch_size needs calculate_per_token_loss",
        ),
        # -- schedules
        ("gpt", CPU, {"lr_warmup_iters": 5}, "lr_warmup_iters 5 must be less than lr_decay_iters 5"),
        ("gpt", CPU, {"min_lr": 0.1}, "min_lr 0.1 must be at most learning_rate 0.001"),
        ("gpt", CPU, {"lr_warmup_init": 0.1}, "lr_warmup_init 0.1 must be at most learning_rate 0.001"),
        ("gpt", CPU, {"decoupled_lr": 1e-4, "min_lr": 2e-4}, "min_lr 0.0002 must be at most decoupled_lr 0.0001"),
        ("gpt", CPU, {"lr_decay_style": "WSD"}, "WSD needs lr_wsd_decay_iters"),
        ("gpt", CPU, {"start_weight_decay": 0.0}, "start_weight_decay and a weight_decay_incr_style other than"),
        ("gpt", CPU, {"weight_decay_incr_style": "cosine"}, "start_weight_decay and a weight_decay_incr_style"),
        (
            "gpt",
            CPU,
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2},
            "start_weight_decay 0.2 must be at most weight_decay 0",
        ),
        # -- stages
        ("gpt", CPU, {"num_layers_in_first_pipeline_stage": 1}, "num_layers_in_first_pipeline_stage needs pipeline"),
        ("gpt", CPU, {"pipeline": 2, "account_for_loss_in_pipeline_split": True}, "8 and 1 that count as layers must"),
        (
            "gpt",
            CPU,
            {"pipeline": 4, "num_layers_in_last_pipeline_stage": 3},
            "num_layers 8 without num_layers_in_last_pipeline_stage does not divide by the 3 other stages",
        ),
        (
            "gpt",
            CPU,
            {"pipeline": 4, "virtual_pipeline": 2, "num_layers_in_first_pipeline_stage": 1},
            "num_layers_in_first_pipeline_stage must be a multiple of virtual_pipeline = 2",
        ),
        (
            "gpt",
            CPU,
            {"pipeline": 2, "pipeline_model_parallel_layout": "Et|t|L"},
            "pipeline_model_parallel_layout has 3 stages of 2 layers in all",
        ),
        (
            "gpt",
            CPU,
            {
                "pipeline": 2,
                "pipeline_model_parallel_layout": "Ett|tL",
                "account_for_embedding_in_pipeline_split": True,
            },
            "a layout has one kind",
        ),
        # -- gradients and fusions
        ("gpt", CPU, {"average_in_collective": True}, "average_in_collective needs data x context > 1"),
        (
            "gpt",
            CPU,
            {"data": 2, "average_in_collective": True, "calculate_per_token_loss": True},
            "average_in_collective needs calculate_per_token_loss = false",
        ),
        ("gpt", CPU, {"grad_reduce_in_fp32": False}, "grad_reduce_in_fp32 = false needs precision bf16"),
        ("gpt", CPU, {"loss_scale": 1024.0}, "loss_scale = 1024 needs precision fp16"),
        ("gpt", CPU, {"apply_rope_fusion": True}, "apply_rope_fusion needs layer_spec transformer-engine"),
        ("gpt", CPU, {"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl needs layer_spec transformer-engine"),
        ("gpt", CPU, {"cross_entropy_fusion": "te"}, "cross_entropy_fusion = te needs layer_spec transformer-engine"),
        (
            "gpt",
            CPU,
            {"normalization": "LayerNorm", "bias_activation_fusion": True},
            "bias_activation_fusion needs normalization RMSNorm",
        ),
        ("gpt", CPU, {"recompute": "moe"}, "recompute = moe needs a model with experts (moe)"),
        ("moe", CPU, {"recompute": "mlp"}, "recompute = mlp needs a model without experts"),
        ("moe", CPU, {"recompute": "moe_act"}, "recompute = moe_act needs moe_grouped_gemm"),
        ("gpt", CPU, {"recompute": "mla_up_proj"}, "recompute = mla_up_proj needs a model that has it"),
        ("gpt", CPU, {"recompute": "layernorm"}, "it needs the package transformer-engine"),
        ("gpt", CPU, {"gradient_accumulation_fusion": True}, "it needs the package apex"),
        ("gpt", CPU, {"precision": "bf16", "masked_softmax_fusion": True}, "it needs the package apex"),
        # -- experts
        ("gpt", CPU, {"data": 2, "expert": 2}, "expert = 2 needs a model with experts (moe)"),
        ("moe", CPU, {"data": 2, "expert": 4}, "data x context = 2 must be a multiple of expert = 4"),
        ("moe", CPU, {"data": 4, "expert": 4, "num_experts": 6}, "num_experts 6 must be a multiple of expert = 4"),
        ("moe", CPU, {"router_topk": 5}, "router_topk 5 must be at most num_experts 4"),
        ("moe", CPU, {"tensor": 2}, "tensor > 1 with experts needs sequence"),
        ("gpt", CPU, {"expert_tensor": 1}, "expert_tensor needs a model with experts (moe)"),
        ("gpt", CPU, {"moe_token_dispatcher_type": "alltoall"}, "moe_token_dispatcher_type needs a model with experts"),
        (
            "moe",
            CPU,
            {"tensor": 2, "sequence": True, "expert_tensor": 4},
            "data x context x tensor = 2 must be a multiple of expert x expert_tensor = 4",
        ),
        (
            "moe",
            CPU,
            {"router_load_balancing_type": "aux_loss", "micro_batch_size": 1},
            "router_load_balancing_type = aux_loss needs the matrix's micro_batch_size",
        ),
        # -- continued in another layout
        ("gpt", CPU, {"tensor": 2, "continue_in": {"pipeline": 2}}, "continue_in needs resume_at"),
        (
            "gpt",
            CPU,
            {"data": 2, "resume_at": 2, "continue_nodes": 4},
            "after resume_at: processes 2 must be a multiple of nodes = 4",
        ),
        (
            "gpt",
            CPU,
            {"tensor": 3, "num_layers": 4, "resume_at": 2, "continue_in": {"pipeline": 3}},
            "after resume_at: num_layers 4 must be a multiple of pipeline x virtual_pipeline = 3",
        ),
        # -- Mamba layers
        ("mamba", H200, {"num_layers": 4}, "has 8 letters and must have one for each of num_layers 4"),
        ("mamba", H200, {"head_dim": 24}, "2 x hidden_size = 256 must be a multiple of mamba.head_dim 24"),
        ("mamba", H200, {"head_dim": 128, "num_groups": 1, "context": 4, "precision": "bf16"}, "tensor x context = 4"),
        ("mamba", H200, {"num_groups": 3}, "/ mamba.head_dim = 16 must be a multiple of mamba.num_groups 3"),
        ("mamba", H200, {"num_groups": 1, "tensor": 2}, "mamba.num_groups 1 must be a multiple of tensor = 2"),
        (
            "mamba",
            H200,
            {"num_groups": 6, "context": 4, "precision": "bf16", "hidden_size": 384, "head_dim": 32},
            "mamba.num_groups / tensor is 6 and must be a multiple or a divisor of context = 4",
        ),
        ("mamba", H200, {"pipeline": 2, "virtual_pipeline": 2}, "virtual_pipeline > 1 needs a model of kind gpt"),
        ("mamba", H200, {"recompute": "full"}, "recompute = full needs a model of kind gpt"),
        ("mamba", H200, {"layer_spec": "local", "context": 2}, "kind mamba-hybrid needs layer_spec transformer-engine"),
        ("mamba", CPU, {"layer_spec": "local"}, "a model of kind mamba-hybrid needs device cuda"),
        ("mamba", H200, {"packed": True, "precision": "bf16"}, "packed needs a model of kind gpt"),
        # -- packed documents and grouped experts
        ("gpt", CPU, {"packed": True}, "Packed sequence is not supported by DotProductAttention"),
        ("te", H200, {"packed": True}, "packed needs precision bf16 or fp8"),
        ("te", H200, {"packed": True, "precision": "bf16", "attention_backend": "unfused"}, "other than unfused"),
        (
            "te",
            H200,
            {"packed": True, "precision": "bf16", "context": 4},
            "sequence_length 64 must be a multiple of the parts of packed documents = 128",
        ),
        (
            "moe",
            H200,
            {"packed": True, "router_load_balancing_type": "seq_aux_loss"},
            "packed needs another router_load_balancing_type",
        ),
        ("moe", H200, {"moe_grouped_gemm": True}, "Grouped GEMM is not available"),
        ("te", H200, {"moe_grouped_gemm": True}, "moe_grouped_gemm needs a model with experts (moe)"),
        # -- fine-tuning
        (
            "te",
            H200,
            {"finetune": "sft", "calculate_per_token_loss": True},
            "finetune = sft needs a model with a recipe",
        ),
        (
            "te",
            H200,
            {"recipe": "qwen25_7b", "finetune": "lora"},
            "finetune = lora needs a model with a recipe of Mega",
        ),
        ("te", H200, FINETUNED | {"calculate_per_token_loss": False}, "finetune = sft needs calculate_per_token_loss"),
        ("te", H200, FINETUNED | {"loss_mask": "uneven"}, "needs calculate_per_token_loss and loss_mask none"),
        ("te", H200, FINETUNED | {"dataset": "text"}, "a recipe of Megatron-Bridge and dataset mock"),
        (
            "te",
            H200,
            FINETUNED | {"tensor": 2, "sequence": True, "sequence_parallel_input_regather": True},
            "needs finetune = lora and sequence",
        ),
        ("te", H200, FINETUNED | {"precision": "fp8"}, "finetune = sft needs precision fp32 or bf16"),
        ("te", H200, FINETUNED | {"packed": True, "micro_batch_size": 2}, "with packed needs micro_batch_size = 1"),
        ("gpt", H200, FINETUNED | {"packed": True, "micro_batch_size": 1}, "Packed sequence is not supported"),
        ("te", H200, FINETUNED | {"packed": True, "data": 16}, "half of global_batch_size = 8 must be a multiple of"),
        # -- fp8
        ("te", H200, {"fp8_recipe": "delayed"}, "fp8_recipe = delayed needs precision fp8"),
        (
            "te",
            Capabilities(device=H200.device, sm=("89",), packages=H200.packages),
            {"precision": "fp8", "fp8_recipe": "blockwise"},
            "fp8_recipe = blockwise needs GPUs of SM 90 or newer; the target has SM 89",
        ),
        ("te", H200, {"precision": "fp8", "hidden_size": 96, "tensor": 4}, "= 24 must be a multiple of 16 for fp8"),
        ("te", H200, {"precision": "fp8", "sequence_length": 36}, "on a rank = 72 must be a multiple of 16 for fp8"),
        ("mamba", H200, {"precision": "fp8", "state_dim": 3}, "/ tensor = 552 must be a multiple of 16 for fp8"),
        # -- what models are made of
        ("gpt", CPU, {"architecture": {"rotary_base": 5e5}, "normalization": "LayerNorm"}, "rotary positions"),
        ("gpt", CPU, {"architecture": {"kv_channels": 12}}, "kv_channels is 12 and must be a multiple of 8"),
        ("gpt", CPU, {"architecture": {"window_attn_skip_freq": 2}}, "window_attn_skip_freq needs window_size"),
        ("gpt", CPU, {"architecture": {"window_size": 8}, "context": 2}, "context > 1 with mla, window_size or"),
        ("gpt", CPU, {"architecture": {"mtp_num_layers": 1}, "loss_mask": "uneven"}, "mtp_num_layers needs loss_mask"),
        ("moe", CPU, {"architecture": {"add_bias_linear": True}}, "add_bias_linear with experts needs layer_spec"),
        ("gpt", CPU, {"mla": LATENT, "num_query_groups": 2}, "mla needs no num_query_groups"),
        ("gpt", H200, {"mla": LATENT, "recipe": "llama3_8b"}, "architecture and mla need a model without a recipe"),
        ("moe", CPU, {"router_num_groups": 2}, "router_num_groups and router_group_topk need each other"),
        ("moe", CPU, {"router_num_groups": 3, "router_group_topk": 1}, "a multiple of router_num_groups"),
        ("moe", CPU, {"router_enable_expert_bias": True}, "needs router_score_function = sigmoid"),
        ("moe", CPU, {"first_dense_layers": 8}, "first_dense_layers 8 must be less than num_layers 8"),
        (
            "moe",
            CPU,
            {"expert_capacity_factor": 1.0, "context": 2},
            "expert_capacity_factor needs tensor x context = 1",
        ),
        # -- what it runs on
        ("te", CPU, {}, "layer_spec transformer-engine needs device cuda"),
        ("moe", CPU, {"moe_token_dispatcher_type": "alltoall"}, "= alltoall needs device cuda"),
        ("te", A100, {"precision": "fp8"}, "precision = fp8 needs GPUs of SM 89 or newer; the target has SM 80"),
    ],
)
def test_broken_rule(kind, capabilities, changes, text):
    texts = messages(row(kind, capabilities, **changes))
    assert any(text in shown for shown in texts), texts


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"pipeline": 3}, ["num_layers 8 must be a multiple of pipeline x virtual_pipeline = 3 (allowed: 1, 2, 4, 8)"]),
        (
            {"data": 3},
            ["global_batch_size 16 must be a multiple of micro_batch_size x data = 6 (allowed: 1, 2, 4, 8, 16)"],
        ),
        (
            {"tensor": 32, "num_attention_heads": 32, "hidden_size": 256, "vocabulary_size": 32},
            ["vocabulary_size 32 must be at least 2 x tensor = 64"],
        ),
    ],
)
def test_message_has_the_rule_and_the_values_that_it_allows(changes, rules):
    assert broken_rules(row("gpt", **changes)) == rules


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=rows())
def test_every_allowed_value_keeps_its_rule(row):
    """The values in a message divide the number before them."""
    for text in broken_rules(row):
        if "(allowed: " in text:
            rule, allowed = text.removesuffix(")").split(" (allowed: ")
            value = int(rule.split(" must be ")[0].rpartition(" ")[2])
            values = [int(word) for word in allowed.split(", ")]
            assert all(value % divisor == 0 for divisor in values)
            assert int(rule.rpartition(" ")[2]) not in values


@pytest.mark.parametrize(
    ("kind", "changes", "package"),
    [
        ("te", {}, "transformer-engine"),
        ("te", {"precision": "bf16", "attention_backend": "flash"}, "flash-attn"),
        ("mamba", {}, "mamba-ssm"),
    ],
)
def test_package_that_the_environment_must_have(kind, changes, package):
    without = Capabilities(device=H200.device, sm=H200.sm, packages=H200.packages - {package})
    (rule,) = missing_capabilities(row(kind, without, **changes))
    assert rule == f"it needs the package {package}, which the environment does not have"


@pytest.mark.parametrize(
    ("recipe", "cures"),
    [(None, (True, True)), ("cured", (True, True)), ("plain", (False, False))],
)
def test_plain_recipe_is_without_the_flags_that_cure_it(recipe, cures):
    layout = {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}
    values = values_of(finetune="lora", **layout, **({"recipe": recipe} if recipe else {}))
    made = replace(row("te", H200, **FINETUNED), values=values)
    settings = made.case.settings
    assert (settings.overlap_p2p_comm, settings.sequence_parallel_input_regather) == cures
    assert not any("recipe" in text for text in broken_rules(made))


def test_plain_recipe_needs_a_recipe():
    made = row("gpt")
    (text,) = broken_rules(replace(made, values=values_of(recipe="plain")))
    assert text == 'recipe = "plain" needs a model with a recipe'
