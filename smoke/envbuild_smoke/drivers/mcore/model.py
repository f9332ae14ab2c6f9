"""The model of a case: its configuration, its layers, and this rank's part of it."""

import importlib.util

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils

from envbuild_smoke.drivers.mcore.architecture import add_yarn, config_class, config_options, expert_parts, gpt_options
from envbuild_smoke.drivers.mcore.layers import gpt_layer_spec, mamba_stack_spec, prediction_spec
from envbuild_smoke.drivers.parts import Options, parallel_sizes
from envbuild_smoke.plan.axes import RECOMPUTED_ALONE, Fp8Recipe
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.plan.precision import weights_dtype
from envbuild_smoke.reference.initial import initial_problem
from envbuild_smoke.reference.names import reference_name

# Steps before layers are captured as CUDA graphs.
GRAPHS_AFTER = 2

# megatron-core 0.16.1 asks whether this is None, and binds it only where Transformer Engine is installed.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None
# 0.16 takes Transformer Engine for installed where its own module of that name can be imported.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


def transformer_config(case: Case, model: Model, device: torch.device) -> TransformerConfig:
    """Return Megatron's configuration of the model in the case's layout.

    A model with RMSNorm is built as Llama and Qwen are: rotary positions, a gated MLP with SiLU, no biases; but for
    what its architecture says.
    """
    layout, settings = case.layout, case.settings
    dtype = getattr(torch, weights_dtype(case))
    config = config_class(model)(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        **parallel_sizes(layout),
        num_layers_in_first_pipeline_stage=layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=layout.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=layout.pipeline_model_parallel_layout,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence,
        calculate_per_token_loss=case.training.calculate_per_token_loss,
        overlap_p2p_comm=settings.overlap_p2p_comm,
        # With two stages the next and the previous stage are one rank, and batched sends and receives take an
        # activation for a gradient without an error (megatron-core 0.15.3, 0.16.1, 0.19.2): the plan says what is used.
        batch_p2p_comm=settings.batch_p2p_comm,
        attention_backend=AttnBackend[settings.attention_backend],
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        # The element type of what pipeline stages send each other; a receiver allocates by it.
        pipeline_dtype=dtype,
        # Weights drawn on the CPU do not depend on the tensor-parallel size.
        use_cpu_initialization=True,
        deterministic_mode=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=settings.gradient_accumulation_fusion,
        masked_softmax_fusion=settings.masked_softmax_fusion,
        bias_activation_fusion=settings.bias_activation_fusion,
        bias_dropout_fusion=settings.bias_dropout_fusion,
        apply_rope_fusion=settings.apply_rope_fusion,
        cross_entropy_loss_fusion=settings.cross_entropy_fusion != "none",
        cross_entropy_fusion_impl="te" if settings.cross_entropy_fusion == "te" else "native",
        # A kernel of Apex.
        persist_layer_norm=False,
        **config_options(model),
        **_expert_options(case, model, device),
        **_mamba_options(model),
        **_graph_options(case),
        **recompute_options(case),
        **fp8_options(case, device),
    )
    add_yarn(config, model)
    return config


def _expert_options(case: Case, model: Model, device: torch.device) -> Options:
    """Return options under which every layout routes each token to the same experts and drops none."""
    if model.moe is None:
        return {}
    return {
        "num_moe_experts": model.moe.num_experts,
        "moe_router_topk": model.moe.router_topk,
        # Scores that are close decide differently after a rounding error; in float32 they seldom are that close.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": model.moe.router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe.aux_loss_coeff,
        # None, and not 0, leaves it out.
        "moe_z_loss_coeff": model.moe.z_loss_coeff or None,
        # The other one is what trains at scale, but it is made of CUDA streams.
        "moe_token_dispatcher_type": case.settings.moe_token_dispatcher_type
        or ("alltoall" if device.type == "cuda" else "allgather"),
        "moe_grouped_gemm": case.settings.moe_grouped_gemm,
        "moe_permute_fusion": False,
        **expert_parts(model, model.moe),
        # A router with a single expert for each token would otherwise always answer 1 and learn nothing.
        "moe_router_pre_softmax": model.moe.router_topk == 1,
    }


def _mamba_options(model: Model) -> Options:
    if model.mamba is None:
        return {}
    return {
        "is_hybrid_model": True,
        "mamba_state_dim": model.mamba.state_dim,
        "mamba_head_dim": model.mamba.head_dim,
        "mamba_num_groups": model.mamba.num_groups,
        # mamba-ssm's fused kernels call causal-conv1d, which it does not require.
        "use_mamba_mem_eff_path": importlib.util.find_spec("causal_conv1d") is not None,
    }


def _graph_options(case: Case) -> Options:
    """Return options of CUDA graphs, whose names not every release has; whole layers are captured."""
    if case.settings.cuda_graph_impl == "none":
        return {}
    return {
        "cuda_graph_impl": case.settings.cuda_graph_impl,
        "cuda_graph_scope": None,
        "cuda_graph_warmup_steps": GRAPHS_AFTER,
    }


def recompute_options(case: Case) -> Options:
    """Return TransformerConfig's options of activation recompute; none where the case keeps its activations."""
    if case.settings.recompute == "none":
        return {}
    if case.settings.recompute in RECOMPUTED_ALONE:
        module = case.settings.recompute
        return {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn" if module == "selective" else module],
        }
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def fp8_options(case: Case, device: torch.device) -> Options:
    """Return options of fp8 training, whose scales are, unless the case says otherwise, those of the values themselves.

    With delayed scaling a scale depends on the micro batches that came before on this rank, and the first
    one's gradients, not scaled at all, are too small for the format: no two layouts agree. With one scale
    for a tensor, tensor parallel ranks have other scales than the whole has, and grad norms are off by 3% (two
    H200s); with a scale for each block of 128, a part has the scales of the whole. Transformer Engine has those
    from SM 90 and CUDA 12.9 on.
    """
    if case.precision != "fp8":
        return {}
    recipe = fp8_recipe(case, device)
    return {"fp8": "e4m3" if recipe == "blockwise" else "hybrid", "fp8_recipe": recipe, "fp8_param": False}


def fp8_recipe(case: Case, device: torch.device) -> Fp8Recipe:
    """Return the plan's, or what the GPU can do."""
    if case.settings.fp8_recipe is not None:
        return case.settings.fp8_recipe
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    blocks = torch.cuda.get_device_capability(device) >= (9, 0) and cuda >= (12, 9)
    return "blockwise" if blocks else "tensorwise"


def build_chunks(config: TransformerConfig, case: Case, model: Model, device: torch.device) -> list[torch.nn.Module]:
    """Return this rank's part of the model: one module per virtual stage."""
    chunks = []
    for stage in range(case.layout.virtual_pipeline):
        # None, not 0, is Megatron's "there are no virtual stages".
        stage_or_none = stage if case.layout.virtual_pipeline > 1 else None
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage_or_none),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage_or_none),
        }
        ends["parallel_output"] = case.settings.parallel_output
        make = _mamba_chunk if model.kind == "mamba-hybrid" else _gpt_chunk
        chunk = make(config, model, stage_or_none, ends).to(device)
        chunks.append(Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk)
    return chunks


def check_initial_weights(chunks: list[torch.nn.Module], model: Model) -> None:
    """Require that this rank's weights were drawn as the configuration says; those of Mamba layers have other rules.

    Also where others are loaded in their place: what a rank draws is what it would train from without a checkpoint.
    """
    if model.kind != "gpt":
        return
    named = ((reference_name(name), value) for chunk in chunks for name, value in chunk.named_parameters())
    problem = initial_problem(named, model.architecture.init_method_std, model.num_layers)
    if problem is not None:
        raise ValueError(f"the initial weights are not drawn as configured: {problem}")


def _gpt_chunk(config: TransformerConfig, model: Model, stage: "int | None", ends: dict[str, bool]) -> torch.nn.Module:
    layers = gpt_layer_spec(config, model, stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=prediction_spec(config, model, layers, stage),
        vocab_size=model.vocabulary_size,
        max_sequence_length=model.sequence_length,
        vp_stage=stage,
        # Where a model does not say otherwise, embeddings are tied: first and last stage exchange gradients, one more
        # thing to get right.
        **gpt_options(model),
        **ends,
    )


def _mamba_chunk(
    config: TransformerConfig, model: Model, stage: "int | None", ends: dict[str, bool]
) -> torch.nn.Module:
    # It imports mamba_ssm, which a stack without such models need not have.
    from megatron.core.models.mamba import MambaModel

    if stage is not None or model.mamba is None:
        raise ValueError("a Mamba hybrid model has no virtual pipeline stages, and needs the sizes of its Mamba layers")
    return MambaModel(
        config=config,
        mamba_stack_spec=mamba_stack_spec(model),
        vocab_size=model.vocabulary_size,
        max_sequence_length=model.sequence_length,
        hybrid_override_pattern=model.mamba.hybrid_override_pattern,
        share_embeddings_and_output_weights=True,
        **ends,
    )
