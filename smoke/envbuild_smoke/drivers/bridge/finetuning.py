"""Fine-tuning of a Hugging Face model with Megatron-Bridge's own recipes, on data that is made on the spot."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig
from megatron.bridge.training.config import ConfigContainer

from envbuild_smoke.drivers.bridge.hugging_face import tokenizer_of, write_model
from envbuild_smoke.drivers.samples import prompts_and_answers
from envbuild_smoke.rank_context import RankContext, checkpoint_path


def cut_finetuning(recipe: ConfigContainer, context: RankContext) -> None:
    """Give a recipe a small Hugging Face model, and prompts with answers, of which each step reads all."""
    case, model = context.case, context.model
    training, sequence_length = case.training, model.sequence_length
    start = checkpoint_path(context.out, case.id, "hugging-face")
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    write_model(start, str(recipe.tokenizer.tokenizer_model), model, dtype, training.seed)
    recipe.checkpoint.pretrained_checkpoint = str(start)
    tokenizer = recipe.tokenizer
    tokenizer.tokenizer_type, tokenizer.tokenizer_model = "HuggingFaceTokenizer", str(tokenizer_of(start))
    folder = context.out / "cases" / case.id / "data"
    _write_samples(
        folder, prompts_and_answers(training.seed, training.global_batch_size, sequence_length, model.vocabulary_size)
    )
    recipe.dataset = GPTSFTDatasetConfig(
        seq_length=sequence_length,
        dataset_root=folder,
        seed=training.seed,
        preprocessing=PromptCompletionSFTPreprocessingConfig(separator=" "),
        enable_offline_packing=training.packed,
        offline_packing_specs=PackedSequenceSpecs(packed_sequence_size=sequence_length) if training.packed else None,
        # The stages of a pipeline send what has the length of the model's sequence.
        dataset_kwargs={"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        # In this process: a rank starts no others.
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
    )
    if case.settings.sequence_parallel_input_regather:
        recipe.peft = replace(recipe.peft, sequence_parallel_input_regather=True)
    # Of packed samples a micro batch has more tokens than of others.
    recipe.model.calculate_per_token_loss = training.calculate_per_token_loss
    recipe.ddp.average_in_collective = False


def _write_samples(folder: Path, samples: list[tuple[list[int], list[int]]]) -> None:
    """Write prompts and answers as Megatron-Bridge reads them; rank 0 writes, and all ranks wait for it."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        rows = (
            {"prompt": " ".join(map(str, prompt)), "completion": " ".join(map(str, answer))}
            for prompt, answer in samples
        )
        (folder / "training.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    torch.distributed.barrier()
