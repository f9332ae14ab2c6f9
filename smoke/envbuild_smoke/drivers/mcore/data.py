"""What a rank reads, and the loss it computes from it."""

import hashlib
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state

from envbuild_smoke.drivers.samples import context_part, rank_micro_batches
from envbuild_smoke.plan.models import Case, Model

# One micro batch: tokens and labels, each of shape [micro batch, sequence], int64.
MicroBatch = tuple[torch.Tensor, torch.Tensor]


class SamplesRead:
    """Keeps a digest of every sample this rank reads, to report in the end what the whole case has read."""

    def __init__(self) -> None:
        self._steps: list[list[bytes]] = []

    def start_step(self) -> None:
        """What is read from now on belongs to a new step."""
        self._steps.append([])

    def add(self, block: torch.Tensor) -> None:
        """Note a micro batch, shape [micro batch, sequence + 1]."""
        # Of each sample, not of the micro batch: then another micro batch size is the same data.
        self._steps[-1] += [hashlib.sha256(row.tobytes()).digest() for row in block.cpu().numpy()]

    def digest(self, micro_batch_size: int) -> str:
        """Return "sha256:..." of all samples of the run, in the order of the global batches; called by every rank.

        It is the same for every layout of one training. Ranks that are to read the same samples and do not
        make it another one, too.
        """
        gathered: list[tuple[int, list[list[bytes]]]] = [(0, [])] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, (parallel_state.get_data_parallel_rank(), self._steps))
        # Reversed: of the ranks with one data-parallel rank the first stands for all, and the loop at the end adds
        # those that differ.
        by_data_rank = dict(reversed(gathered))
        total = hashlib.sha256()
        for step in range(len(self._steps)):
            shares = [by_data_rank[data_rank][step] for data_rank in sorted(by_data_rank)]
            for first in range(0, len(shares[0]), micro_batch_size):
                for share in shares:
                    total.update(b"".join(share[first : first + micro_batch_size]))
        for data_rank, steps in gathered:
            if steps != by_data_rank[data_rank]:
                total.update(repr(steps).encode())
        return f"sha256:{total.hexdigest()}"


def own_batches(
    samples: torch.Tensor, case: Case, device: torch.device, read: "SamplesRead | None"
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of the global batch `samples`, shape [batch, sequence + 1].

    What is taken is noted in `read`, where that is given.
    """
    data_rank = parallel_state.get_data_parallel_rank()
    for block in rank_micro_batches(samples, case.training.micro_batch_size, data_rank, case.layout.data):
        if read is not None:
            read.add(block)
        own = block.to(device)
        yield own_part(own[:, :-1]), own_part(own[:, 1:])


def own_part(tokens: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of `tokens`, shape [micro batch, sequence / context]."""
    rank = parallel_state.get_context_parallel_rank()
    return context_part(tokens, rank, parallel_state.get_context_parallel_world_size())


def forward_step(
    model: Model, batches: Iterator[MicroBatch], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run one micro batch through one chunk; the schedule calls this and then the returned loss function."""
    tokens, labels = next(batches)
    everything = torch.arange(model.sequence_length, device=tokens.device).expand(len(tokens), -1)
    # No mask is given: causal attention is part of the layer spec.
    output = chunk(tokens, own_part(everything), None, labels=labels)
    return output, mean_loss


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


def global_loss(outputs: list[dict[str, torch.Tensor]], microbatches: int) -> float:
    """Return the mean loss over the global batch on the last pipeline stage, 0.0 on other stages."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return 0.0
    # float64: the result does not depend on how the samples were spread over ranks, to all digits shown.
    losses = [output["loss"].double() for output in outputs]
    total = torch.stack(losses).sum() / microbatches
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return float(total) / int(torch.distributed.get_world_size(group))
