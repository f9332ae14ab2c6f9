"""The training data: the same samples in the same order on every layout, drawn from the seed."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy
import torch

from envbuild_smoke.plan.axes import LossMask

# Of a packed sample, each a multiple of this part of it; the rules of layouts have the number too.
DOCUMENT_PARTS = 16


def global_batch(seed: int, step: int, batch_size: int, sequence_length: int, vocabulary_size: int) -> torch.Tensor:
    """Return the samples of a step, shape [batch_size, sequence_length + 1], int64, the same on every rank.

    Each token is the smallest of three uniform draws: with frequent and rare tokens there is something to
    learn and the loss falls; and integers come out the same on every machine.
    """
    # Drawn on the CPU: CUDA's generator gives other numbers. The factor, a prime, keeps the seeds of (seed, step) pairs
    # apart for up to a million steps.
    generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + step)
    shape = (3, batch_size, sequence_length + 1)
    return torch.randint(vocabulary_size, shape, generator=generator).amin(dim=0)


def documents(seed: int, samples: int, sequence_length: int, vocabulary_size: int) -> list[torch.Tensor]:
    """Return documents that have enough tokens for so many samples, each ended by the vocabulary's last token.

    They are shorter and longer than a sample, so that samples have several, or a part of one.
    """
    # Other seeds than those of the samples, masks and packed documents.
    generator = torch.Generator(device="cpu").manual_seed(2**61 + seed)
    end = torch.tensor([vocabulary_size - 1])
    drawn: list[torch.Tensor] = []
    while sum(map(len, drawn)) < samples * sequence_length + 1:
        length = int(torch.randint(sequence_length // 4, 4 * sequence_length, (), generator=generator))
        tokens = torch.randint(vocabulary_size - 1, (3, length), generator=generator).amin(dim=0)
        drawn.append(torch.cat((tokens, end)))
    return drawn


def document_samples(seed: int, samples: int, sequence_length: int, vocabulary_size: int) -> torch.Tensor:
    """Return what megatron-core's GPTDataset is to make of these documents, [samples, sequence + 1], in its order.

    Documents in shuffled order are one stream, a sample begins at each multiple of the sequence length, and these are
    shuffled by the same generator (megatron/core/datasets/gpt_dataset.py, _build_document_sample_shuffle_indices).
    """
    drawn = documents(seed, samples, sequence_length, vocabulary_size)
    generator = numpy.random.RandomState(seed)
    order = numpy.arange(len(drawn), dtype=numpy.int32)
    generator.shuffle(order)
    stream = torch.cat([drawn[index] for index in order])
    starts = numpy.arange((len(stream) - 1) // sequence_length, dtype=numpy.uint32)
    generator.shuffle(starts)
    return torch.stack([stream[start : start + sequence_length + 1] for start in starts[:samples] * sequence_length])


def loss_masks(seed: int, step: int, batch_size: int, sequence_length: int, kind: LossMask) -> torch.Tensor:
    """Return 1.0 for each label that counts in the loss, shape [batch_size, sequence_length].

    "uneven" masks a prefix of each sample, as a prompt is: up to three quarters, each of another length.
    """
    masks = torch.ones(batch_size, sequence_length)
    if kind == "uneven":
        # Other seeds than those of the samples, which `global_batch` takes from 0 on.
        generator = torch.Generator(device="cpu").manual_seed(-1 - (seed * 1_000_003 + step))
        prompts = torch.randint(3 * sequence_length // 4 + 1, (batch_size, 1), generator=generator)
        masks[torch.arange(sequence_length) < prompts] = 0.0
    return masks


def document_numbers(seed: int, step: int, batch_size: int, sequence_length: int, packed: bool) -> torch.Tensor:
    """Return which document of its sample each token belongs to, shape [batch_size, sequence_length], int64.

    Packed samples have two documents or more, of lengths that are multiples of a sixteenth of the sample.
    """
    numbers = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    if packed:
        # Other seeds than those of the samples and of the masks.
        generator = torch.Generator(device="cpu").manual_seed(2**62 + seed * 1_000_003 + step)
        starts = torch.rand(batch_size, DOCUMENT_PARTS, generator=generator) < 0.15
        starts[:, 0] = False
        certain = torch.randint(1, DOCUMENT_PARTS, (batch_size, 1), generator=generator)
        parts = starts.scatter(1, certain, True).cumsum(dim=1)
        numbers = parts.repeat_interleave(sequence_length // DOCUMENT_PARTS, dim=1)
    return numbers


def document_lengths(numbers: torch.Tensor) -> list[int]:
    """Return the lengths of the documents of a micro batch, sample after sample, from their `document_numbers`."""
    return [int(length) for row in numbers for length in row.unique_consecutive(return_counts=True)[1]]


def packed_part(lengths: Sequence[int], rank: int, ways: int) -> torch.Tensor:
    """Return which tokens of packed documents context-parallel rank `rank` has: its `context_part` of each."""
    first = 0
    parts = []
    for length in lengths:
        parts.append(context_part(torch.arange(first, first + length)[None], rank, ways)[0])
        first += length
    return torch.cat(parts)


def prompts_and_answers(
    seed: int, number: int, sequence_length: int, vocabulary_size: int
) -> list[tuple[list[int], list[int]]]:
    """Return tokens to fine-tune with, none of them the last of the vocabulary, which ends an answer.

    Of a prompt with its answer two fit into a sequence, and three do not: packing finds half as many rows.
    """
    shortest, longest = sequence_length // 3 + 1, sequence_length // 2
    tokens = global_batch(seed, 0, number, longest, vocabulary_size - 1)
    generator = torch.Generator(device="cpu").manual_seed(-1 - seed)
    lengths = torch.randint(shortest, longest + 1, (number,), generator=generator).tolist()
    prompts = torch.randint(1, shortest // 2, (number,), generator=generator).tolist()
    return [
        (row[:prompt], row[prompt:length])
        for row, prompt, length in zip(tokens.tolist(), prompts, lengths, strict=True)
    ]


def rank_micro_batches(samples: torch.Tensor, size: int, rank: int, ways: int) -> Iterator[torch.Tensor]:
    """Yield the micro batches of data-parallel rank `rank` of `ways`, each of shape [size, ...].

    As Megatron's own samplers do: micro batches are dealt to the ranks in turn.
    """
    # So a micro batch has the same samples on every layout.
    for first in range(rank * size, len(samples), size * ways):
        yield samples[first : first + size]


def context_part(tokens: torch.Tensor, rank: int, ways: int) -> torch.Tensor:
    """Return context-parallel rank `rank`'s part of `tokens` [micro batch, sequence], 1 / `ways` of it.

    Of 2 x ways equal pieces it gets pieces rank and 2 x ways - 1 - rank, as Megatron expects it: under a
    causal mask the first pieces are cheap and the last are dear, and so all ranks have the same work.
    """
    if ways == 1:
        return tokens.contiguous()
    pieces = tokens.chunk(2 * ways, dim=1)
    return torch.cat((pieces[rank], pieces[2 * ways - 1 - rank]), dim=1).contiguous()


def sample_digests(samples: torch.Tensor) -> list[bytes]:
    """Return the SHA-256 of each sample, shape [samples, sequence + 1]."""
    return [hashlib.sha256(row.tobytes()).digest() for row in samples.cpu().numpy()]


def order_problem(read: Sequence[Sequence[bytes]], planned: Sequence[Sequence[bytes]]) -> str | None:
    """Return how the samples of a training, step by step, are not the planned ones; None where they are."""
    for step, (own, expected) in enumerate(zip(read, planned, strict=False), 1):
        if list(own) != list(expected):
            # Of the whole training: a sampler that shuffles takes them from other steps.
            same = sorted(chain.from_iterable(read)) == sorted(chain.from_iterable(planned))
            what = "the planned samples in another order" if same else "other samples than the planned ones"
            return f"step {step} read {what}"
    return None if len(read) == len(planned) else f"{len(read)} steps read samples, {len(planned)} were planned"
