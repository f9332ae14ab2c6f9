"""Small Hugging Face models made on the spot, and how Megatron-Bridge imports and exports them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core import tensor_parallel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.results import HuggingFace

# As Megatron's default.
FFN_WIDTH = 4
# The kinds of Hugging Face's models that recipes download, by how their names there begin.
HUGGING_FACE: dict[str, tuple[type[PretrainedConfig], str]] = {
    "meta-llama/": (LlamaConfig, "LlamaForCausalLM"),
    "Qwen/Qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "Qwen/Qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
}


def small_config(name: str, model: Model) -> PretrainedConfig:
    """Return the sizes of a model as those of the kind that Hugging Face's hub has by this name."""
    kinds = [kind for begin, kind in HUGGING_FACE.items() if str(name).startswith(begin)]
    if not kinds:
        raise ValueError(f"driver bridge knows no small model like {name}, which recipe {model.recipe} downloads")
    ((config, architecture),) = kinds
    heads = model.num_attention_heads
    return config(
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=FFN_WIDTH * model.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=model.num_query_groups or heads,
        head_dim=model.hidden_size // heads,
        max_position_embeddings=model.sequence_length,
        vocab_size=model.vocabulary_size,
        tie_word_embeddings=False,
        architectures=[architecture],
    )


def write_model(folder: Path, name: str, model: Model, dtype: torch.dtype, seed: int) -> None:
    """Save a model with random weights as Hugging Face's library does; next to it a tokenizer, whose words are numbers.

    Rank 0 writes, and all ranks wait for it.
    """
    if torch.distributed.get_rank() == 0:
        made = AutoModelForCausalLM.from_config(small_config(name, model))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name_of, value in made.named_parameters():
                # Norms and biases too: with ones and zeros, some in another's place would not show.
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(1 + noise / 10 if "norm" in name_of else noise / value.shape[-1] ** 0.5)
        made.to(dtype).save_pretrained(folder)
        end = str(model.vocabulary_size - 1)
        words = Tokenizer(WordLevel({str(token): token for token in range(model.vocabulary_size)}, unk_token=end))
        words.pre_tokenizer = WhitespaceSplit()
        made_tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end, unk_token=end)
        # With the model's config beside it transformers would take that model's own class, which adds words.
        made_tokenizer.save_pretrained(tokenizer_of(folder))
    torch.distributed.barrier()


def tokenizer_of(folder: Path) -> Path:
    """Return where the tokenizer of a model is."""
    return folder.with_name(f"{folder.name}-tokenizer")


def compare_with_hugging_face(chunks: list[torch.nn.Module], folder: Path, case: Case) -> HuggingFace:
    """Return what Megatron-Bridge has made of the model in `folder`; every rank calls this and gets the same.

    `logits` is how far its logits are from those that transformers computes in float64, and `spread` how far those are
    that transformers computes in the type of the weights; of all tokens the largest difference relative to the norm.
    Logits are None where ranks have but a part of the layers or of the sequence. `tensors` are those that were exported
    again, `differing` those of them, or of the model, that are not the same bit for bit.
    """
    stored = _read(folder)
    exported = dict(AutoBridge.from_hf_pretrained(folder).export_hf_weights(chunks, cpu=True, show_progress=False))
    expected = stored.state_dict()
    differs = tuple(differing(expected, exported))
    compared = HuggingFace(tensors=len(exported), differing=differs, logits=None, spread=None)
    if case.layout.pipeline == case.layout.context == 1:
        (chunk,) = chunks
        logits, spread = _logits(chunk, stored, case)
        compared = replace(compared, logits=logits, spread=spread)
    return compared


def _read(folder: Path) -> Any:
    """Return the model in `folder`, its parameters in the type that they are stored in."""
    # Not from_pretrained: where calls that name CUDA are redirected, the frequencies of its positions are not set
    # (transformers 5.12, whatever the memory had).
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    weights = load_file(folder / "model.safetensors")
    for name, value in model.named_parameters():
        value.data = weights.pop(name)
    if weights:
        raise ValueError(f"{folder} has weights that its model has not: {', '.join(sorted(weights))}")
    return model


def differing(expected: Mapping[str, torch.Tensor], exported: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors of which one side has none, or another: type, shape and each bit."""
    both = expected.keys() & exported.keys()
    other = {
        name
        for name in both
        if expected[name].dtype != exported[name].dtype or not torch.equal(expected[name], exported[name])
    }
    return sorted(other | (expected.keys() ^ exported.keys()))


def _logits(chunk: Any, stored: Any, case: Case) -> tuple[float, float]:
    """Return how far the chunk's logits, and those in the type of the weights, are from those in float64."""
    config, vocabulary = stored.config, stored.config.vocab_size
    generator = torch.Generator().manual_seed(case.training.seed)
    tokens = torch.randint(vocabulary, (1, config.max_position_embeddings), generator=generator)
    device = next(chunk.parameters()).device
    with torch.no_grad():
        logits = _without_dropout(chunk, tokens.to(device))
        if case.settings.parallel_output:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        usual = stored.to(device)(tokens.to(device)).logits.cpu()
        exact = stored.cpu().double()(tokens).logits
    return _farthest(exact, logits[..., :vocabulary].cpu()), _farthest(exact, usual)


def _without_dropout(chunk: Any, tokens: torch.Tensor) -> torch.Tensor:
    chunk.eval()
    positions = torch.arange(tokens.size(1), device=tokens.device)[None]
    logits: torch.Tensor = chunk(tokens, positions, None)
    chunk.train()
    return logits


def _farthest(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest ||actual - expected|| / ||expected|| of all tokens."""
    distance = torch.linalg.vector_norm(actual.double() - expected.double(), dim=-1)
    return float((distance / torch.linalg.vector_norm(expected.double(), dim=-1)).max())
