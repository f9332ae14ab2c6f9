"""The forward pass, from named weights. Names of weights and activations are those of Megatron's modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from envbuild_smoke.reference import formulas
from envbuild_smoke.reference.config import ExpertsConfig, MambaConfig, ModelConfig, NotComparedError
from envbuild_smoke.reference.rounding import product


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tokens and labels, [batch, sequence]. `loss_mask` weighs the losses; `segments` numbers packed sequences."""

    tokens: Tensor
    labels: Tensor
    loss_mask: "Tensor | None" = None
    segments: "Tensor | None" = None


class ReferenceModel:
    """A decoder over weights by name; `read` has the names in the order in which they were first used."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.read: list[str] = []
        self._config = config
        self._weights = weights
        self._auxiliary = torch.zeros(())

    def losses(self, batch: MicroBatch, note: "Callable[[str, Tensor], None] | None" = None) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, [batch, sequence], and the sum of the auxiliary losses of all layers.

        `note` gets each activation by the name of the module that has it as its output.
        """
        config, self._note = self._config, note or _nothing
        length, device = batch.tokens.size(1), batch.tokens.device
        self._same = formulas.may_attend(length, batch.segments, device)
        self._positions = formulas.positions_of(length, batch.segments, device)
        embedding = self._weight("embedding.word_embeddings.weight")
        self._auxiliary = embedding.new_zeros(())
        values = embedding[batch.tokens]
        if config.positions == "learned":
            values = values + self._weight("embedding.position_embeddings.weight")[self._positions]
        self._note("embedding", values)
        for index, kind in enumerate(config.layers):
            name = f"decoder.layers.{index}"
            # Residual layers with the norm first: Radford et al. 2019 (GPT-2), section 2.3.
            if kind == "M":
                values = values + self._mamba(f"{name}.mixer", self._norm(f"{name}.norm", values))
            if kind in "T*":
                values = values + self._attention(name, self._norm(f"{name}.input_layernorm", values))
            if kind in "T-":
                values = values + self._mlp(name, self._norm(f"{name}.pre_mlp_layernorm", values))
            self._note(name, values)
        values = self._norm("decoder.final_layernorm", values)
        # Press & Wolf 2016 (arXiv 1608.05859): the output has the weights of the embedding.
        output = embedding if config.tied else self._weight("output_layer.weight")
        return formulas.cross_entropy(values @ output.T, batch.labels), self._auxiliary

    def _weight(self, name: str) -> Tensor:
        if name not in self._weights:
            raise NotComparedError(f"the model has no {name}")
        if name not in self.read:
            self.read.append(name)
        return self._weights[name]

    def _norm(self, name: str, values: Tensor) -> Tensor:
        config, weight = self._config, self._weight(f"{name}.weight")
        if config.normalization == "RMSNorm":
            values = formulas.rms_norm(values, weight, config.norm_epsilon)
        else:
            values = formulas.layer_norm(values, weight, self._weight(f"{name}.bias"), config.norm_epsilon)
        self._note(name, values)
        return values

    def _linear(self, name: str, values: Tensor, bias: bool) -> Tensor:
        values = product(values, self._weight(f"{name}.weight"))
        return values + self._weight(f"{name}.bias") if bias else values

    def _attention(self, layer: str, values: Tensor) -> Tensor:
        config = self._config
        name = f"{layer}.self_attention"
        qkv = self._linear(f"{name}.linear_qkv", values, config.qkv_bias)
        self._note(f"{name}.linear_qkv", qkv)
        # By group of heads: its queries, its key, its value.
        share = config.heads // config.query_groups
        parts = qkv.unflatten(-1, (config.query_groups, share + 2, -1))
        queries, keys, content = parts[:, :, :, :share].flatten(2, 3), parts[:, :, :, share], parts[:, :, :, share + 1]
        if config.positions == "rotary":
            queries, keys = (formulas.rotate(part, self._positions, config.rotary_base) for part in (queries, keys))
        context = formulas.attention(queries, keys, content, self._same)
        self._note(f"{name}.core_attention", context)
        return self._linear(f"{name}.linear_proj", context, config.bias)

    def _mlp(self, layer: str, values: Tensor) -> Tensor:
        config = self._config
        if config.experts is not None:
            return self._experts(f"{layer}.mlp", values, config.experts)
        return self._two_layers(f"{layer}.mlp", values, config.bias)

    def _two_layers(self, name: str, values: Tensor, bias: bool) -> Tensor:
        hidden = formulas.activate(self._linear(f"{name}.linear_fc1", values, bias), self._config.gated)
        return self._linear(f"{name}.linear_fc2", hidden, bias)

    def _experts(self, name: str, values: Tensor, experts: ExpertsConfig) -> Tensor:
        weights, auxiliary = formulas.route(values @ self._weight(f"{name}.router.weight").T, experts)
        self._auxiliary = self._auxiliary + auxiliary
        self._note(f"{name}.router", weights)
        total = torch.zeros_like(values)
        # Each computes all tokens: those that it was not chosen for count 0.
        for index in range(experts.count):
            own = self._two_layers(f"{name}.experts.local_experts.{index}", values, bias=False)
            total = total + weights[..., index, None] * own
        return total

    def _mamba(self, name: str, values: Tensor) -> Tensor:
        """Dao & Gu 2024 (arXiv 2405.21060), section 7.1 and figure 6: z, x, B, C and dt are projections of the input.

        The order of their rows, and softplus(dt + bias) and -exp(A_log), are those of the paper's published code.
        """
        mamba: MambaConfig | None = self._config.mamba
        if mamba is None:
            raise NotComparedError("the model has Mamba layers of unknown sizes")
        projected = self._linear(f"{name}.in_proj", values, bias=False)
        heads = self._weight(f"{name}.A_log").numel()
        inner, state = heads * mamba.head_size, mamba.groups * mamba.state_size
        gate, mixed, steps = projected.split((inner, inner + 2 * state, heads), dim=-1)
        convolution = self._weight(f"{name}.conv1d.weight"), self._weight(f"{name}.conv1d.bias")
        mixed = formulas.silu(formulas.causal_convolution(mixed, *convolution, self._same))
        inputs, enter, leave = mixed.split((inner, state, state), dim=-1)
        inputs = inputs.unflatten(-1, (heads, -1))
        pair = enter.unflatten(-1, (mamba.groups, -1)), leave.unflatten(-1, (mamba.groups, -1))
        steps = torch.nn.functional.softplus(steps + self._weight(f"{name}.dt_bias"))
        decay = -self._weight(f"{name}.A_log").exp()
        outputs = formulas.state_space(inputs, steps, decay, pair, self._same)
        outputs = (outputs + inputs * self._weight(f"{name}.D")[:, None]).flatten(2)
        outputs = formulas.gated_group_norm(outputs, gate, self._weight(f"{name}.norm.weight"), mamba)
        return self._linear(f"{name}.out_proj", outputs, bias=False)


def _nothing(_name: str, _value: Tensor) -> None:
    """Keep no activation."""
