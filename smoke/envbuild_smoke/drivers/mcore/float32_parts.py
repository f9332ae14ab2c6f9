"""What a library keeps in float32 under bf16, fp16 and fp8, each part compared with float64 from its own inputs.

Gradients are summed over micro batches, and weights updated, in float32; attention's softmax and the loss are computed
in it (Micikevicius et al. 2017, "Mixed Precision Training", arXiv 1710.03740, sections 3.1 and 3.3). After a whole step
the rounding of everything else hides whether one of them was: so each is compared where it happens. What float32 itself
does to a part is measured, by computing it once more in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from torch import Tensor

from envbuild_smoke.reference.config import OptimizerConfig
from envbuild_smoke.reference.names import reference_name
from envbuild_smoke.reference.spread import difference
from envbuild_smoke.reference.training import Adam
from envbuild_smoke.results import FLOAT32_BITS, Float32Part

# Given a type, in which it is computed: the value and the gradient of the input.
_Computed = Callable[[torch.dtype], tuple[Tensor, Tensor]]


@dataclass
class _Call:
    """The tensors of one call of a module: what went in and came out, and the gradients of both."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Keep a tensor as it is now, and its gradient when that is there."""
        if isinstance(value, Tensor):
            self.tensors[name] = value.detach().clone()
            if value.requires_grad:
                value.register_hook(lambda gradient: self._keep_gradient(name, gradient))

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        self.tensors[f"{name} gradient"] = gradient.detach().clone()


class Float32Parts:
    """Notes the first step of a model on one rank, and each update of its weights.

    Made before Megatron's DistributedDataParallel wraps the model, whose hooks take gradients away. `sums`: whether
    gradients are summed in float32 at all.
    """

    def __init__(
        self, chunk: torch.nn.Module, optimizer: OptimizerConfig, watching: Callable[[], bool], *, sums: bool
    ) -> None:
        self._watching = watching
        self._watches_sums = sums
        self._parameters = {reference_name(name): weight for name, weight in chunk.named_parameters()}
        self._sums: dict[str, Tensor] = {}
        # With the number by which a module multiplies scores.
        self._softmax: dict[str, tuple[_Call, float]] = {}
        self._loss = _Call()
        self._hooks = list(self._watch(chunk))
        self._parts: list[Float32Part] = []
        self._adams = {
            dtype: Adam(optimizer, {name: weight.detach().to(dtype) for name, weight in self._parameters.items()})
            for dtype in (torch.float64, torch.float32)
        }

    def _watch(self, chunk: torch.nn.Module) -> Iterator[Any]:
        for name, weight in self._parameters.items() if self._watches_sums else ():
            yield weight.register_hook(self._adding(name))
        for name, module in chunk.named_modules():
            if isinstance(module, FusedScaleMaskSoftmax):
                call = _Call()
                self._softmax[reference_name(name)] = call, 1.0 if module.scale is None else float(module.scale)
                yield module.register_forward_pre_hook(self._once(call, ("scores", "mask", "offset")))
                yield module.register_forward_hook(self._output_of(call, "weights"))
            if name.rpartition(".")[2] == "output_layer":
                yield module.register_forward_hook(self._output_of(self._loss, "logits"))
        yield chunk.register_forward_hook(self._labels, with_kwargs=True)

    def _adding(self, name: str) -> Any:
        def add(gradient: Tensor) -> None:
            if not self._watching():
                return
            whole = gradient.detach().double()
            self._sums[name] = self._sums[name] + whole if name in self._sums else whole

        return add

    def _once(self, call: _Call, names: tuple[str, ...]) -> Any:
        def keep(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> "tuple[Any, ...] | None":
            if call.tensors or not self._watching():
                return None
            for name, value in zip(names, inputs, strict=False):
                call.keep(name, value)
            # Scores that are masked in their place would lose the hook on their gradient.
            return (inputs[0].clone(), *inputs[1:])

        return keep

    def _output_of(self, call: _Call, name: str) -> Any:
        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            # Of several predictions of a micro batch the last one is the next token's.
            if self._watching() and "losses" not in call.tensors and (name == "logits" or name not in call.tensors):
                call.keep(name, output[0] if isinstance(output, tuple) else output)

        return keep

    def _labels(self, _module: torch.nn.Module, _inputs: Any, options: Any, output: Any) -> None:
        if self._watching() and "losses" not in self._loss.tensors:
            self._loss.tensors["labels"] = options["labels"].clone()
            self._loss.keep("losses", output)

    def gradients(self, loss_scale: float) -> None:
        """Note the gradients of a step, of a loss that has this scale: called before they are clipped."""
        gradients = {name: weight.main_grad.detach() for name, weight in self._parameters.items()}
        if not self._parts:
            for hook in self._hooks:
                hook.remove()
            self._parts += [*self._accumulated(gradients), *self._computed()]
            self._sums, self._softmax, self._loss = {}, {}, _Call()
        for dtype, adam in self._adams.items():
            adam.step({name: gradient.to(dtype) / loss_scale for name, gradient in gradients.items()})

    def result(self) -> tuple[Float32Part, ...]:
        """Return all parts, after the last step."""
        return (*self._parts, *self._main_weights())

    def _accumulated(self, gradients: dict[str, Tensor]) -> Iterator[Float32Part]:
        # Where a kernel adds a gradient to the sum itself, autograd has none (Megatron's grad_added_to_main_grad).
        sums = {
            name: whole
            for name, whole in self._sums.items()
            if not getattr(self._parameters[name], "grad_added_to_main_grad", False)
        }
        # The schedule may divide all of them by one number, as by that of tokens.
        product = sum(float((gradients[name].double() * whole).sum()) for name, whole in sums.items())
        square = sum(float(whole.square().sum()) for whole in sums.values())
        scale = product / square if square else 1.0
        for name, whole in sums.items():
            yield _part("accumulation", name, gradients[name], whole * scale, (whole * scale).float())

    def _computed(self) -> Iterator[Float32Part]:
        for name, (call, scale) in self._softmax.items():
            if call.tensors:
                yield from _both("softmax", name, call, "weights", "scores", _softmax(call.tensors, scale))
        if "logits" in self._loss.tensors:
            yield from _both("loss", "of a token", self._loss, "losses", "logits", _loss(self._loss.tensors))

    def _main_weights(self) -> Iterator[Float32Part]:
        exact, float32 = (adam.weights for adam in self._adams.values())
        for name, weight in self._parameters.items():
            main = getattr(weight, "main_param", weight).detach()
            yield _part("main weights", name, main, exact[name], float32[name])


def _both(part: str, name: str, call: _Call, output: str, given: str, compute: _Computed) -> Iterator[Float32Part]:
    """Compare what a module gave, and the gradient of what it was given."""
    tensors = call.tensors
    own = (tensors[output], tensors[f"{given} gradient"])
    names = (name, f"{name}, gradient")
    for label, value, exact, float32 in zip(names, own, compute(torch.float64), compute(torch.float32), strict=True):
        yield _part(part, label, value, exact, float32)


def _part(part: Any, name: str, own: Tensor, exact: Tensor, float32: Tensor) -> Float32Part:
    """Compare with what float64 gives, rounded to the type that the library's result is in."""
    bits = {torch.bfloat16: 8, torch.float16: 11}.get(own.dtype, FLOAT32_BITS)
    if bits != FLOAT32_BITS:
        exact, float32 = exact.to(own.dtype).double(), float32.to(own.dtype)
    return Float32Part(
        part=part,
        name=name,
        relative_difference=difference(own, exact.double()),
        spread=difference(float32, exact.double()),
        bits=bits,
    )


def _softmax(tensors: dict[str, Tensor], scale: float) -> _Computed:
    """Vaswani et al. 2017 (arXiv 1706.03762), equation 1; with an offset, which is one more score for nothing."""

    def compute(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scores = tensors["scores"].to(dtype) * scale
        # Which tokens are masked is compared elsewhere.
        scores = scores.masked_fill(tensors["weights"] == 0, -torch.inf)
        if "offset" in tensors:
            offset = tensors["offset"].to(dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, offset), dim=-1)
        weights = scores.softmax(-1)[..., : tensors["scores"].size(-1)]
        gradient = tensors["weights gradient"].to(dtype)
        return weights, scale * weights * (gradient - (gradient * weights).sum(-1, keepdim=True))

    return compute


def _loss(tensors: dict[str, Tensor]) -> _Computed:
    """Cross entropy, Goodfellow et al. 2016, "Deep Learning", section 6.2.2.3; logits are [sequence, batch, tokens]."""

    def compute(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits, labels = tensors["logits"].to(dtype).transpose(0, 1), tensors["labels"]
        losses = logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
        one_hot = torch.nn.functional.one_hot(labels, logits.size(-1)).to(dtype)
        gradient = (logits.softmax(-1) - one_hot) * tensors["losses gradient"].to(dtype)[..., None]
        return losses, gradient.transpose(0, 1)

    return compute
