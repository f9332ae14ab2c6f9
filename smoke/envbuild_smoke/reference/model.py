"""The forward pass, from named weights. Names of weights and activations are those of Megatron's modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from envbuild_smoke.reference import formulas
from envbuild_smoke.reference.config import ExpertsConfig, LatentConfig, MambaConfig, ModelConfig, NotComparedError
from envbuild_smoke.reference.positions import concentration, rotate
from envbuild_smoke.reference.rounding import product
from envbuild_smoke.reference.routing import moved_bias, route


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tokens and labels, [batch, sequence]. `loss_mask` weighs the losses; `segments` numbers packed sequences."""

    tokens: Tensor
    labels: Tensor
    loss_mask: "Tensor | None" = None
    segments: "Tensor | None" = None


class ReferenceModel:
    """A decoder over weights by name; `read` has the names in the order in which they were first used.

    It keeps the biases of experts, which no gradient moves: `end_step` does.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.read: list[str] = []
        self._config = config
        self._weights = weights
        self._auxiliary = torch.zeros(())
        # Of each router the biases, and how many tokens each expert took in this step.
        self._biases: dict[str, Tensor] = {}
        self._loads: dict[str, Tensor] = {}

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
            values = self._layer(f"decoder.layers.{index}", index, kind, values)
        values = self._norm("decoder.final_layernorm", values)
        self._predict(batch, values)
        return formulas.cross_entropy(self._logits(values), batch.labels), self._auxiliary

    def end_step(self) -> None:
        """Move the biases of experts by what they took since the last step."""
        rate = None if self._config.experts is None else self._config.experts.bias_rate
        if rate is not None:
            self._biases = {name: moved_bias(self._biases[name], load, rate) for name, load in self._loads.items()}
            self._loads = {}

    def _layer(self, name: str, index: int, kind: str, values: Tensor) -> Tensor:
        # Residual layers with the norm first: Radford et al. 2019 (GPT-2), section 2.3.
        if kind == "M":
            values = values + self._mamba(f"{name}.mixer", self._norm(f"{name}.norm", values))
        if kind in "T*":
            normed = self._norm(f"{name}.input_layernorm", values)
            latent = self._config.latent
            same = self._seen(index)
            values = values + (
                self._attention(name, normed, same) if latent is None else self._latent(name, normed, same, latent)
            )
        if kind in "T-":
            values = values + self._mlp(name, index, self._norm(f"{name}.pre_mlp_layernorm", values))
        self._note(name, values)
        return values

    def _logits(self, values: Tensor) -> Tensor:
        # Press & Wolf 2016 (arXiv 1608.05859): the output has the weights of the embedding.
        output = "embedding.word_embeddings.weight" if self._config.tied else "output_layer.weight"
        return values @ self._weight(output).T

    def _predict(self, batch: MicroBatch, values: Tensor) -> None:
        """Add the losses of layers that predict further tokens: DeepSeek-V3 (arXiv 2412.19437), section 2.2.

        Equations 21 to 25, with the embedding before the other half of what is projected. The tokens past the end are
        not predicted; what stands for them is token 0, which is seen by none that is.
        """
        config, tokens, labels = self._config, batch.tokens, batch.labels
        if config.predicted and (batch.loss_mask is not None and not bool(batch.loss_mask.all())):
            raise NotComparedError("losses of further tokens are compared where no token is masked")
        for depth in range(config.predicted):
            tokens, labels = (torch.nn.functional.pad(part[:, 1:], (0, 1)) for part in (tokens, labels))
            name = f"mtp.layers.{depth}"
            embedded = self._weight("embedding.word_embeddings.weight")[tokens]
            both = self._norm(f"{name}.enorm", embedded), self._norm(f"{name}.hnorm", values)
            values = self._linear(f"{name}.eh_proj", torch.cat(both, dim=-1), bias=False)
            values = self._layer(f"{name}.transformer_layer", len(config.layers) + depth, "T", values)
            values = self._norm(f"{name}.final_layernorm", values)
            known = formulas.cross_entropy(self._logits(values), labels)[:, : -1 - depth]
            self._auxiliary = self._auxiliary + config.predicted_weight / config.predicted * known.mean()

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
        # Heads side by side, as modules have them.
        self._note(name, values.flatten(2))
        return values

    def _linear(self, name: str, values: Tensor, bias: bool) -> Tensor:
        values = product(values, self._weight(f"{name}.weight"))
        return values + self._weight(f"{name}.bias") if bias else values

    def _attention(self, layer: str, values: Tensor, same: Tensor) -> Tensor:
        config = self._config
        name = f"{layer}.self_attention"
        qkv = self._linear(f"{name}.linear_qkv", values, config.qkv_bias)
        self._note(f"{name}.linear_qkv", qkv)
        # By group of heads: its queries, its key, its value.
        share = config.heads // config.query_groups
        parts = qkv.unflatten(-1, (config.query_groups, share + 2, -1))
        queries, keys, content = parts[:, :, :, :share].flatten(2, 3), parts[:, :, :, share], parts[:, :, :, share + 1]
        if config.qk_norm:
            # Over each head by itself, before the rotation: Qwen3 (arXiv 2505.09388), section 2, after Dehghani et al.
            # 2023 (arXiv 2302.05442), section 2.1.
            queries, keys = self._norm(f"{name}.q_layernorm", queries), self._norm(f"{name}.k_layernorm", keys)
        if config.positions == "rotary":
            queries, keys = (rotate(part, self._positions, config.rotary) for part in (queries, keys))
        context = formulas.attention(queries, keys, content, same, self._sinks(name, queries))
        self._note(f"{name}.core_attention", context)
        return self._linear(f"{name}.linear_proj", context, config.bias)

    def _latent(self, layer: str, values: Tensor, same: Tensor, latent: LatentConfig) -> Tensor:
        """Multi-latent attention: DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47, with norms over both latents.

        Those are in DeepSeek-V3's published model.py (`q_norm`, `kv_norm`), which also turns pairs (2i, 2i + 1).
        """
        config, name = self._config, f"{layer}.self_attention"
        queries = self._linear(f"{name}.linear_q_down_proj", values, bias=False)
        queries = self._linear(f"{name}.linear_q_up_proj", self._norm(f"{name}.q_layernorm", queries), bias=False)
        queries = queries.unflatten(-1, (config.heads, -1))
        down = self._linear(f"{name}.linear_kv_down_proj", values, bias=False)
        compressed, key = down[..., : latent.rank], down[..., latent.rank :]
        up = self._linear(f"{name}.linear_kv_up_proj", self._norm(f"{name}.kv_layernorm", compressed), bias=False)
        keys, content = up.unflatten(-1, (config.heads, -1)).tensor_split((latent.size,), dim=-1)
        # One key to rotate for all heads.
        turned, turned_key = (self._turned(part) for part in (queries[..., latent.size :], key[:, :, None]))
        keys = torch.cat((keys, turned_key.expand(-1, -1, config.heads, -1)), dim=-1)
        queries = torch.cat((queries[..., : latent.size], turned), dim=-1)
        context = formulas.attention(queries, keys, content, same, factor=concentration(config.rotary) ** 2)
        self._note(f"{name}.core_attention", context)
        return self._linear(f"{name}.linear_proj", context, bias=False)

    def _turned(self, values: Tensor) -> Tensor:
        # With its even elements before the odd ones, (i, i + half) are the pairs (2i, 2i + 1).
        apart = torch.cat((values[..., 0::2], values[..., 1::2]), dim=-1)
        return rotate(apart, self._positions, self._config.rotary)

    def _seen(self, index: int) -> Tensor:
        """Return which token sees which in a layer; every so many layers all of them (gpt-oss, section 2)."""
        window, windowless = self._config.window, self._config.windowless
        if window is None or (windowless is not None and (index + 1) % windowless == 0):
            return self._same
        return formulas.within_window(self._same, window)

    def _sinks(self, name: str, queries: Tensor) -> "Tensor | None":
        if self._config.sinks == "learnt":
            return self._weight(f"{name}.core_attention.softmax_offset")
        return None if self._config.sinks is None else queries.new_zeros(queries.size(2))

    def _mlp(self, layer: str, index: int, values: Tensor) -> Tensor:
        config = self._config
        if config.experts is not None and index >= config.experts.dense_layers:
            return self._experts(f"{layer}.mlp", values, config.experts)
        return self._two_layers(f"{layer}.mlp", values, config.bias)

    def _two_layers(self, name: str, values: Tensor, bias: bool) -> Tensor:
        hidden = formulas.activate(self._linear(f"{name}.linear_fc1", values, bias), self._config)
        return self._linear(f"{name}.linear_fc2", hidden, bias)

    def _experts(self, name: str, values: Tensor, experts: ExpertsConfig) -> Tensor:
        logits = values @ self._weight(f"{name}.router.weight").T
        if experts.bias:
            logits = logits + self._weight(f"{name}.router.bias")
        bias = None
        if experts.bias_rate is not None:
            bias = self._biases.setdefault(name, logits.new_zeros(experts.count))
        weights, chosen, auxiliary = route(logits, experts, bias)
        self._loads[name] = self._loads.get(name, 0) + chosen.sum((0, 1)).detach()
        self._auxiliary = self._auxiliary + auxiliary
        self._note(f"{name}.router", weights)
        total = torch.zeros_like(values)
        # Each computes all tokens: those that it was not chosen for count 0.
        for index in range(experts.count):
            own = self._two_layers(f"{name}.experts.local_experts.{index}", values, experts.bias)
            total = total + weights[..., index, None] * own
        # DeepSeekMoE (arXiv 2401.06066), equation 9.
        return total + self._two_layers(f"{name}.shared_experts", values, bias=False) if experts.shared else total

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
