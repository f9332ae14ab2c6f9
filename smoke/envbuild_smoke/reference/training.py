"""Training: gradients over micro batches, clipping, Adam."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from envbuild_smoke.reference.config import ModelConfig, NotComparedError, OptimizerConfig
from envbuild_smoke.reference.model import MicroBatch, ReferenceModel
from envbuild_smoke.reference.schedule import learning_rate, weight_decay

# The most attention scores of a layer at a time: 512 MiB.
SCORES = 2**26
EXACT = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training gave: loss and gradient norm of each step, and tensors by name, in the order of computation.

    `activations` are of the first micro batch, `gradients` of the first step before clipping, `weights` after the last.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    activations: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    config: ModelConfig,
    optimizer: OptimizerConfig,
    weights: Mapping[str, Tensor],
    steps: Iterable[Sequence[MicroBatch]],
    note: "Callable[[int, Mapping[str, Tensor]], None] | None" = None,
    rounding: "AbstractContextManager[object]" = EXACT,
) -> Trained:
    """Train from `weights`, which stay as they are, on the micro batches of each step.

    `note` gets the number of each step, from 0 on, and its gradients before clipping. `rounding` is entered for each
    forward pass.
    Raises NotComparedError for weights that the model lacks or has too many of.
    """
    # One tensor may be there under two names: each gets a leaf of its own.
    own = {name: weight.detach().double().clone().requires_grad_() for name, weight in weights.items()}
    model, adam, trained = ReferenceModel(config, own), Adam(optimizer, own), Trained()
    for batches in steps:
        for weight in own.values():
            weight.grad = None
        _check_auxiliary(config, optimizer, batches)
        loss, size = 0.0, len(batches[0].tokens)
        for batch, shares in _joined(config, batches, _shares(batches, optimizer)):
            with rounding:
                note_each = None if trained.gradients else _noting(trained.activations, size)
                tokens, auxiliary = model.losses(batch, note_each)
            mean = (tokens * shares).sum()
            # Autograd sums over the micro batches. The auxiliary losses are means over a micro batch whatever the loss
            # is a mean over, and no part of the loss that is reported.
            torch.autograd.backward(mean + auxiliary / len(batches))
            loss += float(mean.detach())
        if unread := sorted(name for name, weight in own.items() if weight.grad is None):
            raise NotComparedError(f"the model has tensors that the reference has not: {', '.join(unread[:3])}")
        gradients = {name: weight.grad for name, weight in own.items() if weight.grad is not None}
        if not trained.gradients:
            # Backwards, what was used last comes first.
            trained.gradients.update((name, gradients[name].clone()) for name in reversed(model.read))
        if note is not None:
            note(len(trained.steps), gradients)
        norm = adam.step(gradients)
        model.end_step()
        trained.steps.append((loss, norm))
    trained.weights.update((name, own[name].detach()) for name in model.read)
    return trained


def _noting(activations: dict[str, Tensor], size: int) -> Callable[[str, Tensor], None]:
    """Return what keeps each activation of the first micro batch, of so many samples."""

    def note(name: str, value: Tensor) -> None:
        if name not in activations:
            activations[name] = value.detach()[:size].clone()

    return note


def _joined(
    config: ModelConfig, batches: Sequence[MicroBatch], shares: Sequence[Tensor]
) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield micro batches joined into larger ones, which takes less time.

    One by one where something is of a micro batch.
    """
    samples, length = batches[0].tokens.shape
    most = 1 if _is_of_micro_batches(config) else max(1, SCORES // (samples * length * length * config.heads))
    for first in range(0, len(batches), most):
        part = batches[first : first + most]
        joined = {name: [getattr(batch, name) for batch in part] for name in ("tokens", "labels", "segments")}
        tensors = {name: None if values[0] is None else torch.cat(values) for name, values in joined.items()}
        yield MicroBatch(**tensors), torch.cat(list(shares[first : first + most]))


def _is_of_micro_batches(config: ModelConfig) -> bool:
    experts = config.experts
    return bool(config.predicted) or (experts is not None and experts.is_of_micro_batches)


def _has_auxiliary(config: ModelConfig) -> bool:
    experts = config.experts
    return experts is not None and any((experts.auxiliary, experts.sequence_auxiliary, experts.z))


def _check_auxiliary(config: ModelConfig, optimizer: OptimizerConfig, batches: Sequence[MicroBatch]) -> None:
    """Refuse what no source defines: how much an auxiliary loss weighs next to a mean over tokens that are not masked.

    megatron-core states that it is 1 / micro batches, and divides by the tokens that are left (0.16.1, moe/router.py).
    """
    masked = any(batch.loss_mask is not None and not bool(batch.loss_mask.all()) for batch in batches)
    if optimizer.per_token_loss and masked and _has_auxiliary(config):
        raise NotComparedError("the weight of router losses is not defined where tokens are masked and counted")


def _shares(batches: Sequence[MicroBatch], optimizer: OptimizerConfig) -> list[Tensor]:
    """Return how much each token counts: the loss of the step is the sum of the tokens' losses times these."""
    masks = [torch.ones_like(b.tokens) if b.loss_mask is None else b.loss_mask for b in batches]
    masks = [mask.double() for mask in masks]
    if optimizer.per_token_loss:
        total = sum(float(mask.sum()) for mask in masks)
        return [mask / total for mask in masks]
    return [mask / mask.sum() / len(masks) for mask in masks]


class Adam:
    """Kingma & Ba 2014 (arXiv 1412.6980), algorithm 1, with the weight decay of Loshchilov & Hutter 2017.

    That is algorithm 2 of arXiv 1711.05101, with the learning rate in the place of the schedule and alpha, as torch's
    AdamW has it.
    """

    def __init__(self, config: OptimizerConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self.weights = weights
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self._count = 0

    def step(self, gradients: Mapping[str, Tensor], norm: "float | None" = None) -> float:
        """Update the weights; return the norm of all gradients together, by which they are clipped, or `norm`."""
        config = self._config
        self._count += 1
        if norm is None:
            norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
        # Pascanu et al. 2012 (arXiv 1211.5063), algorithm 1; 1e-6 as in torch.nn.utils.clip_grad_norm_.
        scale = min(1.0, config.clip_norm / (norm + 1e-6))
        for name, weight in self.weights.items():
            gradient, (first, second) = gradients[name] * scale, self._moments[name]
            first.mul_(config.beta1).add_(gradient, alpha=1 - config.beta1)
            second.mul_(config.beta2).add_(gradient.square(), alpha=1 - config.beta2)
            mean, variance = first / (1 - config.beta1**self._count), second / (1 - config.beta2**self._count)
            rate, decay = self._group(name)
            # Not through autograd: `data` is the tensor alone.
            weight.data.mul_(1 - rate * decay).sub_(rate * mean / (variance.sqrt() + config.epsilon))
        return norm

    def _group(self, name: str) -> tuple[float, float]:
        """Return learning rate and weight decay of a weight in this step."""
        config = self._config
        at_ends = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        own = config.embedding_learning_rate if at_ends else None
        rate = learning_rate(config.schedule, config.learning_rate if own is None else own, self._count - 1)
        decays = self.weights[name].dim() > 1
        return rate, weight_decay(config.schedule, config.weight_decay, self._count - 1) if decays else 0.0
