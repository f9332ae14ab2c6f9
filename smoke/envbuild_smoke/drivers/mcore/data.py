"""What a rank reads, and the loss it computes from it."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from envbuild_smoke.drivers.samples import (
    context_part,
    document_lengths,
    document_numbers,
    loss_masks,
    packed_part,
    rank_micro_batches,
    sample_digests,
)
from envbuild_smoke.plan.axes import Training
from envbuild_smoke.plan.models import Case

# What Megatron's schedules take from a loss function: the loss and what is reported, or with the number of tokens
# between them.
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]] | tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A rank's part of a micro batch, each tensor of shape [micro batch, sequence / context].

    Where documents are packed it is one long sequence, [1, micro batch x sequence / context].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    packed: "PackedSeqParams | None" = None


class SamplesRead:
    """Keeps a digest of every sample this rank reads, to report in the end what the whole case has read."""

    def __init__(self, before: str = "") -> None:
        # The digest of those that earlier parts of the case have read.
        self._before = before
        # Of each step the data-parallel rank that this rank was, and its samples.
        self._steps: list[tuple[int, list[bytes]]] = []

    def start_step(self) -> None:
        """What is read from now on belongs to a new step."""
        self._steps.append((parallel_state.get_data_parallel_rank(), []))

    def add(self, block: torch.Tensor) -> None:
        """Note a micro batch, shape [micro batch, sequence + 1]."""
        # Of each sample, not of the micro batch: then another micro batch size is the same data.
        self._steps[-1][1].extend(sample_digests(block))

    @property
    def steps(self) -> list[list[bytes]]:
        """The digest of each sample that this rank has read, step by step."""
        return [samples for _, samples in self._steps]

    def digest(self, training: Training) -> str:
        """Return "sha256:..." of all samples of the case so far, in the order of the global batches.

        Called by every rank. In a fine-tuning, samples of a step may be in any order, as those are that were packed.

        It is the same for every layout of one training. Ranks that are to read the same samples and do not
        make it another one, too.
        """
        gathered: list[list[tuple[int, list[bytes]]]] = [[]] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, self._steps)
        digest = self._before
        micro_batch_size = training.micro_batch_size if training.finetune == "none" else None
        for ranks in zip(*gathered, strict=True):
            # From step to step, so that a case in parts has that of one in a piece.
            total = hashlib.sha256(digest.encode())
            # Reversed: of the ranks with one data-parallel rank the first stands for all, and the loop at the end adds
            # those that differ.
            by_data_rank = dict(reversed([pair for pair in ranks if pair[1]]))
            shares = [by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]
            if micro_batch_size is None:
                shares = [sorted(sample for share in shares for sample in share)]
            most = max(map(len, shares), default=0)
            size = micro_batch_size or most
            for first in range(0, most, max(size, 1)):
                for share in shares:
                    total.update(b"".join(share[first : first + size]))
            for data_rank, samples in ranks:
                # In the middle of a pipeline a framework need not read any.
                if samples and samples != by_data_rank[data_rank]:
                    total.update(repr((data_rank, samples)).encode())
            digest = f"sha256:{total.hexdigest()}"
        return digest


def own_batches(
    samples: torch.Tensor, step: int, case: Case, device: torch.device, read: "SamplesRead | None"
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of a step's global batch `samples`, shape [batch, sequence + 1].

    What is taken is noted in `read`, where that is given.
    """
    data_rank, training = parallel_state.get_data_parallel_rank(), case.training
    shape = (len(samples), samples.size(1) - 1)
    masks = loss_masks(training.seed, step, *shape, training.loss_mask)
    documents = document_numbers(training.seed, step, *shape, training.packed)
    shares = (
        rank_micro_batches(whole, training.micro_batch_size, data_rank, case.layout.data)
        for whole in (samples, masks, documents)
    )
    for block, mask, numbers in zip(*shares, strict=True):
        if read is not None:
            read.add(block)
        tensors = [part.to(device) for part in (block[:, :-1], block[:, 1:], mask)]
        yield _packed(tensors, document_lengths(numbers)) if training.packed else _whole(tensors)


def _whole(tensors: list[torch.Tensor]) -> MicroBatch:
    everything = torch.arange(tensors[0].size(1), device=tensors[0].device).expand(len(tensors[0]), -1)
    tokens, labels, mask = map(own_part, tensors)
    return MicroBatch(tokens=tokens, labels=labels, mask=mask, positions=own_part(everything))


def _packed(tensors: list[torch.Tensor], lengths: list[int]) -> MicroBatch:
    """Return samples as documents in a row, as Megatron-LM's get_batch with thd: each is split over context ranks."""
    device = tensors[0].device
    rank, ways = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    own = packed_part(lengths, rank, ways).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    tokens, labels, mask, positions = (tensor.reshape(1, -1)[:, own] for tensor in (*tensors, positions))
    ends = torch.tensor([0, *lengths], device=device).cumsum(dim=0).int()
    longest = max(lengths)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        # Transformer Engine's context parallelism wants these, which are the same without padding.
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return MicroBatch(tokens=tokens, labels=labels, mask=mask, positions=positions, packed=packed)


def own_part(tokens: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of `tokens`, shape [micro batch, sequence / context]."""
    rank = parallel_state.get_context_parallel_rank()
    return context_part(tokens, rank, parallel_state.get_context_parallel_world_size())


def forward_step(
    case: Case, batches: Iterator[MicroBatch], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """Run one micro batch through one chunk; the schedule calls this and then the returned loss function."""
    batch = next(batches)
    # Not every model takes them.
    options = {} if batch.packed is None else {"packed_seq_params": batch.packed}
    # No mask is given: causal attention is part of the layer spec.
    output = chunk(batch.tokens, batch.positions, None, labels=batch.labels, **options)
    training = case.training
    plain = training.loss_mask == "none" and not training.calculate_per_token_loss
    return output, mean_loss if plain else partial(masked_loss, batch.mask)


def mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean over the tokens of a micro batch, for the gradient and for the report.

    `token_losses` has shape [micro batch, sequence / context]. The schedule multiplies the first by the
    context-parallel size, and gradients are averaged over data and context ranks together: divided by that
    size here, a context rank counts with its share of the tokens and not with all of them.
    """
    mean = token_losses.float().mean()
    # A new tensor: the schedule scales what it gets in place, and the report must not change with it.
    # With a wrong scale here, CP 2 on two H200s had twice the baseline's grad norm (6.71 for 3.40), while the loss
    # fell.
    return mean / parallel_state.get_context_parallel_world_size(), {"loss": mean.detach().clone()}


def masked_loss(
    mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum over the tokens that `mask` leaves, how many they are, and both for the report.

    As Megatron-LM's pretrain_gpt.py: the schedule divides by the number of the micro batch, or, with
    `calculate_per_token_loss`, `finalize_model_grads` by that of the global batch.
    """
    total, tokens = (token_losses.float() * mask).sum(), mask.sum()
    return total, tokens.int(), {"loss": total.detach().clone(), "tokens": tokens}


def global_loss(outputs: list[dict[str, torch.Tensor]], microbatches: int, *, per_token: bool) -> float:
    """Return the mean loss over the global batch on the last pipeline stage, 0.0 on other stages.

    It is the mean over all tokens, or the mean over the micro batches of the mean over their tokens.
    """
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return 0.0
    # float64: the result does not depend on how the samples were spread over ranks, to all digits shown.
    rows = [torch.stack([value.double() for value in output.values()]) for output in outputs]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if "tokens" in outputs[0]:
        # The tokens of a micro batch may be spread over context-parallel ranks.
        reported = torch.stack(rows)
        torch.distributed.all_reduce(reported, group=parallel_state.get_context_parallel_group())
        rows = [reported.sum(dim=0)] if per_token else [row[:1] / row[1] for row in reported]
    if per_token:
        (total,) = rows
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total[0] / total[1])
    total = torch.cat([row[:1] for row in rows]).sum() / microbatches
    torch.distributed.all_reduce(total, group=group)
    return float(total) / int(torch.distributed.get_world_size(group))
