"""Megatron-Bridge's own pretrain recipes, cut down to what a case of the plan asks for.

What is not named here stays as the recipe has it: layers, norm, positions, fusions, loss, optimizer and its constants.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.bridge import AutoBridge, recipes
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

from envbuild_smoke.drivers.bridge.finetuning import cut_finetuning
from envbuild_smoke.drivers.bridge.hugging_face import small_config
from envbuild_smoke.drivers.mcore.model import recompute_options
from envbuild_smoke.drivers.parts import refuse_unsupported
from envbuild_smoke.drivers.recipe_options import overlap_options, precision_options, set_layout
from envbuild_smoke.drivers.text import write_text
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.rank_context import RankContext

# Values of a byte; the next one ends a document.
BYTES = 256


def recipe_of(context: RankContext) -> ConfigContainer:
    """Return the recipe's configuration of a part of a case.

    Raises ValueError where the case asks for what this driver does not set.
    """
    case, model = context.case, context.model
    refuse_unsupported(case, model)
    with _without_hub(model):
        recipe: ConfigContainer = getattr(recipes, _recipe_name(case, model))()
    _cut_model(recipe.model, case, model)
    _cut_training(recipe, context)
    if case.training.finetune == "none":
        _cut_data(recipe, context)
    else:
        cut_finetuning(recipe, context)
    set_layout(recipe.model, case)
    recipe.dist.use_gloo_process_groups = False
    if case.settings.overlap_p2p_comm:
        recipe.comm_overlap = CommOverlapConfig(**overlap_options(case.settings))
    if case.precision != "bf16":
        is_fp8 = case.precision == "fp8"
        recipe.mixed_precision = MixedPrecisionConfig(bf16=is_fp8, **precision_options(case, context))
    if context.device == "cpu":
        _fit_cpu(recipe)
    return recipe


def _recipe_name(case: Case, model: Model) -> str:
    """Return the name of the recipe, which Megatron-Bridge has three times: to pretrain, SFT, and PEFT with LoRA."""
    kinds = {"none": "pretrain", "sft": "sft", "lora": "peft"}
    return str(model.recipe).replace("_pretrain_", f"_{kinds[case.training.finetune]}_")


@contextmanager
def _without_hub(model: Model) -> Iterator[None]:
    """Give recipes a small model's sizes in the place of those that they read from Hugging Face's hub."""
    original = AutoBridge.__dict__["from_hf_pretrained"]
    AutoBridge.from_hf_pretrained = staticmethod(lambda name, **_: AutoBridge.from_hf_config(small_config(name, model)))
    try:
        yield
    finally:
        AutoBridge.from_hf_pretrained = original


def _cut_model(config: Any, case: Case, model: Model) -> None:
    config.seq_length = model.sequence_length
    config.parallel_output = case.settings.parallel_output
    # The recipes ask for it; Megatron-Core's own output layer does it with an extension of Apex, which has no wheel.
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        config.gradient_accumulation_fusion = False
    for name, value in recompute_options(case).items():
        setattr(config, name, value)


def _cut_data(recipe: ConfigContainer, context: RankContext) -> None:
    model, data = context.model, recipe.dataset
    data.seq_length = model.sequence_length
    data.random_seed = context.case.training.seed
    # In this process: a rank starts no others.
    data.num_workers, data.persistent_workers, data.pin_memory = 0, False, False
    folder = context.out / "cases" / context.case.id / "data"
    data.path_to_cache = str(folder / "index")
    # All of it is for training.
    data.split = "1,0,0"
    tokenizer = recipe.tokenizer
    tokenizer.tokenizer_type, tokenizer.use_tokenizer_vocab_size = "NullTokenizer", False
    tokenizer.vocab_size = model.vocabulary_size
    if model.dataset == "text":
        tokenizer.vocab_size = BYTES + 1
        data.blend = ([str(write_text(folder, lambda text: [*text.encode(), BYTES], model.vocabulary_size))], None)


def _cut_training(recipe: ConfigContainer, context: RankContext) -> None:
    training, settings = context.case.training, context.case.settings
    train, optimizer, checkpoint = recipe.train, recipe.optimizer, recipe.checkpoint
    # Data is read in an order that depends on it, and a part has that of the whole: `CaseCallback` ends it.
    train.train_iters = training.steps
    train.global_batch_size, train.micro_batch_size = training.rows, training.micro_batch_size
    train.manual_gc = False
    recipe.validation.eval_iters = 0
    optimizer.lr = optimizer.min_lr = training.learning_rate
    optimizer.weight_decay = training.weight_decay
    optimizer.clip_grad = training.clip_grad_norm
    # Constant: the recipe's warm-up of hundreds of steps would not move the weights.
    scheduler = recipe.scheduler
    scheduler.lr_decay_style, scheduler.lr_warmup_iters, scheduler.lr_decay_iters = "constant", 0, training.steps
    scheduler.start_weight_decay = scheduler.end_weight_decay = training.weight_decay
    optimizer.use_distributed_optimizer = recipe.ddp.use_distributed_optimizer = settings.distributed_optimizer
    recipe.ddp.overlap_param_gather = optimizer.overlap_param_gather = settings.overlap_param_gather
    recipe.ddp.overlap_grad_reduce = settings.overlap_grad_reduce
    recipe.ddp.bucket_size = settings.bucket_size
    recipe.rng.seed = training.seed
    # Nothing is logged to files, or saved but between the parts.
    recipe.logger.tensorboard_dir = None
    recipe.logger.log_interval = training.steps
    checkpoint.save = str(context.saves_to) if context.saves_to is not None else None
    checkpoint.load = str(context.resumes_from) if context.resumes_from is not None else None
    checkpoint.save_interval = context.part.until
    checkpoint.async_save = False
    # The default is a state that another layout cannot load.
    checkpoint.dist_ckpt_optim_fully_reshardable = context.case.continue_in is not None


def _fit_cpu(recipe: ConfigContainer) -> None:
    config = recipe.model
    # Of Transformer Engine and Apex.
    config.transformer_impl, config.transformer_layer_spec = "local", local_layer_spec
    config.apply_rope_fusion = config.persist_layer_norm = False
    config.cross_entropy_fusion_impl = "native"
    # gloo reads what it sends later; with NCCL the memory is kept by the stream.
    config.deallocate_pipeline_outputs = False
    recipe.dist.distributed_backend = "gloo"
    recipe.dataset.skip_getting_attention_mask_from_dataset = False
