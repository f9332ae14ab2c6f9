"""NeMo's own pretrain recipes, cut down to what a case of the plan asks for.

What is not named here stays as the recipe has it: layers, norm, positions, fusions, loss, optimizer and its constants.
"""

from collections.abc import Callable
from typing import Any

import fiddle
import nemo_run
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment
from megatron.core.distributed import DistributedDataParallelConfig
from nemo.collections import llm
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision
from nemo.lightning.resume import AutoResume

from envbuild_smoke.drivers.mcore.model import recompute_options
from envbuild_smoke.drivers.nemo.data import RecordedMockData, RecordedText
from envbuild_smoke.drivers.nemo.limits import gpus_of
from envbuild_smoke.drivers.parts import Options, refuse_unsupported
from envbuild_smoke.drivers.recipe_options import overlap_options, precision_options, set_layout
from envbuild_smoke.drivers.text import write_text
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.rank_context import RankContext

# As Megatron's default.
FFN_WIDTH = 4


class RunnersRanks(ClusterEnvironment):  # type: ignore[misc]
    """The ranks that the runner has started; Lightning is to start none."""

    def __init__(self, rank: int, world_size: int, host: str, port: int) -> None:
        self._rank, self._world_size, self._host, self._port = rank, world_size, host, port

    @staticmethod
    def detect() -> bool:
        """It is always named, and never found."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        """The runner has started them."""
        return True

    @property
    def main_address(self) -> str:
        """Where the ranks of the case have met."""
        return self._host

    @property
    def main_port(self) -> int:
        """The port there."""
        return self._port

    def world_size(self) -> int:
        """Number of ranks of the case."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Refuse what Lightning computes, where it is something else."""
        if size != self._world_size:
            raise ValueError(f"NeMo counts {size} ranks, and the case has {self._world_size}")

    def global_rank(self) -> int:
        """Number of this rank in the case."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Refuse what Lightning computes, where it is something else."""
        if rank != self._rank:
            raise ValueError(f"NeMo numbers this rank {rank}, and the case {self._rank}")

    def local_rank(self) -> int:
        """Its place in `devices`, which is not the number of its GPU."""
        return self._rank

    def node_rank(self) -> int:
        """There is one node."""
        return 0


def recipe_of(context: RankContext, callbacks: "list[Any]") -> Callable[[], Any]:
    """Return the recipe's pretrain of a part of a case, ready to be called. `callbacks` follow those of the recipe.

    Raises ValueError where the case asks for what this driver does not set.
    """
    case, model = context.case, context.model
    refuse_unsupported(case, model)
    recipe = getattr(llm, str(model.recipe)).pretrain_recipe(
        dir=str(context.out / "cases" / case.id / "nemo"), name=case.id, num_nodes=1, num_gpus_per_node=1
    )
    _cut_model(recipe.model.config, case, model)
    if context.device == "cpu":
        _fit_cpu(recipe)
    recipe.data = _data(context, case, model)
    _cut_training(recipe, case)
    if case.precision != "bf16":
        precision = "32" if case.precision == "fp32" else "bf16-mixed"
        options = {**precision_options(case, context), "grad_reduce_in_fp32": True}
        recipe.trainer.plugins = nemo_run.Config(MegatronMixedPrecision, precision=precision, **options)
    _lay_out(recipe.trainer, context)
    recipe.trainer.callbacks.extend(callbacks)
    # Nothing is logged to files, or saved but by the driver.
    recipe.log.tensorboard = recipe.log.ckpt = recipe.resume = None
    recipe.trainer.max_steps = context.part.until
    if context.resumes_from is not None:
        recipe.resume = nemo_run.Config(AutoResume, resume_from_path=str(context.resumes_from))
        # AutoResume asks for one. It saves nothing.
        recipe.trainer.enable_checkpointing = True
        recipe.trainer.callbacks.append(nemo_run.Config(ModelCheckpoint, save_top_k=0))
    built: Callable[[], Any] = fiddle.build(recipe)
    return built


def _cut_model(config: Any, case: Case, model: Model) -> None:
    config.num_layers = model.num_layers
    config.hidden_size = model.hidden_size
    config.ffn_hidden_size = FFN_WIDTH * model.hidden_size
    config.num_attention_heads = model.num_attention_heads
    config.num_query_groups = model.num_query_groups
    config.seq_length = model.sequence_length
    config.vocab_size = model.vocabulary_size
    config.parallel_output = case.settings.parallel_output
    for name, value in recompute_options(case).items():
        setattr(config, name, value)


def _fit_cpu(recipe: Any) -> None:
    config = recipe.model.config
    # Of Transformer Engine and Apex.
    config.apply_rope_fusion = config.persist_layer_norm = False
    # Ranks send each other what they have loaded from GPU to GPU.
    recipe.trainer.strategy.ckpt_parallel_load = False
    # gloo reads what it sends later; with NCCL the memory is kept by the stream.
    config.deallocate_pipeline_outputs = False


def _data(context: RankContext, case: Case, model: Model) -> Any:
    training = case.training
    options: Options = {
        "seq_length": model.sequence_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "num_train_samples": training.steps * training.global_batch_size,
        # In this process: a rank starts no others.
        "num_workers": 0,
        "pin_memory": False,
    }
    if model.dataset == "mock":
        # The default tokenizer downloads GPT-2's files. NullTokenizer adds an entry of its own.
        tokenizer = nemo_run.Config(NullTokenizer, vocab_size=model.vocabulary_size - 1)
        return nemo_run.Config(RecordedMockData, tokenizer=tokenizer, **options)
    folder, bytes_ = context.out / "cases" / context.case.id / "text", ByteLevelTokenizer()
    return nemo_run.Config(
        RecordedText,
        paths=[str(write_text(folder, lambda text: [*bytes_.text_to_ids(text), bytes_.eos_id], model.vocabulary_size))],
        tokenizer=nemo_run.Config(ByteLevelTokenizer, vocab_size=model.vocabulary_size),
        index_mapping_dir=str(folder / "index"),
        # All of it is for training.
        split="1,0,0",
        seed=training.seed,
        **options,
    )


def _cut_training(recipe: Any, case: Case) -> None:
    training, settings = case.training, case.settings
    optimizer = recipe.optim.config
    optimizer.lr = training.learning_rate
    optimizer.weight_decay = training.weight_decay
    optimizer.clip_grad = training.clip_grad_norm
    optimizer.use_distributed_optimizer = settings.distributed_optimizer
    # Constant: the recipe's warm-up of hundreds of steps would not move the weights.
    recipe.optim.lr_scheduler.warmup_steps = 0
    recipe.optim.lr_scheduler.min_lr = training.learning_rate
    trainer = recipe.trainer
    trainer.log_every_n_steps = 1
    trainer.limit_val_batches = trainer.limit_test_batches = trainer.num_sanity_val_steps = 0
    # Lightning's default is a share of an epoch, and PreTrainingDataModule divides by it.
    trainer.val_check_interval = training.steps if recipe.data.__fn_or_cls__ is RecordedText else None
    trainer.enable_checkpointing = trainer.enable_progress_bar = trainer.logger = False
    if case.precision == "fp32":
        optimizer.bf16, optimizer.params_dtype = False, torch.float32


def _lay_out(trainer: Any, context: RankContext) -> None:
    case, settings, strategy = context.case, context.case.settings, trainer.strategy
    set_layout(strategy, case)
    strategy.use_gloo_process_groups = False
    strategy.ckpt_async_save = False
    # NeMo's default is a state that another layout cannot load.
    strategy.ckpt_optim_fully_reshardable = case.continue_in is not None
    strategy.ddp = nemo_run.Config(
        DistributedDataParallelConfig,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        grad_reduce_in_fp32=True,
        bucket_size=settings.bucket_size,
    )
    # Without it the plain recipe sends in batches, and with two interleaved stages trains wrongly.
    if settings.overlap_p2p_comm:
        trainer.callbacks.append(nemo_run.Config(MegatronCommOverlapCallback, **overlap_options(settings)))
    trainer.accelerator = "gpu" if context.device == "cuda" else "cpu"
    gpus = gpus_of(context.rank, context.world_size, context.device_index, torch.cuda.device_count())
    trainer.devices = gpus if context.device == "cuda" else context.world_size
    ranks = nemo_run.Config(
        RunnersRanks, rank=context.rank, world_size=context.world_size, host=context.host, port=context.port
    )
    trainer.plugins = [trainer.plugins, ranks]
