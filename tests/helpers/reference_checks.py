"""Checks of the reference's formulas with torch itself, run by the Python of a stack."""

from __future__ import annotations

import math
import sys

import torch

from envbuild_smoke.drivers.samples import document_lengths, document_numbers, packed_part
from envbuild_smoke.reference import formulas
from envbuild_smoke.reference.config import (
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    NotComparedError,
    OptimizerConfig,
    ScheduleConfig,
)
from envbuild_smoke.reference.initial import initial_problem
from envbuild_smoke.reference.model import MicroBatch, ReferenceModel
from envbuild_smoke.reference.positions import RotaryConfig, rotate
from envbuild_smoke.reference.routing import moved_bias, route
from envbuild_smoke.reference.schedule import learning_rate, weight_decay
from envbuild_smoke.reference.training import train

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
HIDDEN, LENGTH, VOCABULARY, HEADS, GROUPS, STATE = 32, 12, 64, 8, 2, 4
MAMBA = MambaConfig(state_size=STATE, head_size=2 * HIDDEN // HEADS, groups=GROUPS)
ADAM = OptimizerConfig(learning_rate=1e-2, clip_norm=1e9)


def config(layers="T", **changes):
    values = {
        "normalization": "RMSNorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "qkv_bias": False,
    }
    sizes = {"hidden_size": HIDDEN, "heads": 4, "query_groups": 2}
    return ModelConfig(layers=layers, **{**sizes, **values, **changes})


def weights_of(model, **shapes):
    """Random weights under every name that a model reads: found by asking for them."""
    names = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}
    for index, kind in enumerate(model.layers):
        layer = f"decoder.layers.{index}"
        if kind in "T*":
            names[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
            names[f"{layer}.self_attention.linear_qkv.weight"] = (2 * HIDDEN, HIDDEN)
            names[f"{layer}.self_attention.linear_proj.weight"] = (HIDDEN, HIDDEN)
        if kind in "T-":
            names[f"{layer}.pre_mlp_layernorm.weight"] = (HIDDEN,)
            count = model.experts.count if model.experts else 0
            parts = [f"mlp.experts.local_experts.{expert}" for expert in range(count)] or ["mlp"]
            for part in parts:
                names[f"{layer}.{part}.linear_fc1.weight"] = (8 * HIDDEN, HIDDEN)
                names[f"{layer}.{part}.linear_fc2.weight"] = (HIDDEN, 4 * HIDDEN)
            if count:
                names[f"{layer}.mlp.router.weight"] = (count, HIDDEN)
        if kind == "M":
            inner, mixed = 2 * HIDDEN, 2 * HIDDEN + 2 * GROUPS * STATE
            own = {"in_proj.weight": (inner + mixed + HEADS, HIDDEN), "conv1d.weight": (mixed, 1, 4),
                   "conv1d.bias": (mixed,), "A_log": (HEADS,), "D": (HEADS,), "dt_bias": (HEADS,),
                   "norm.weight": (inner,), "out_proj.weight": (HIDDEN, inner)}  # fmt: skip
            names[f"{layer}.norm.weight"] = (HIDDEN,)
            names |= {f"{layer}.mixer.{name}": shape for name, shape in own.items()}
    return {name: torch.randn(shape) * 0.2 + (len(shape) == 1) for name, shape in {**names, **shapes}.items()}


def batch(samples=3, **more):
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1))
    return MicroBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], **more)


def formulas_are_torchs():
    values, weight, bias = torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN), torch.randn(HIDDEN)
    close(
        formulas.layer_norm(values, weight, bias, 1e-3),
        torch.nn.functional.layer_norm(values, (HIDDEN,), weight, bias, 1e-3),
    )
    close(formulas.rms_norm(values, weight, 1e-3), torch.nn.functional.rms_norm(values, (HIDDEN,), weight, 1e-3))
    close(formulas.activate(values, config(activation="gelu")), torch.nn.functional.gelu(values))
    close(formulas.activate(values, config(activation="squared_relu")), torch.nn.functional.relu(values) ** 2)
    gate, linear = values.chunk(2, -1)
    close(formulas.activate(values, config()), torch.nn.functional.silu(gate) * linear)
    clamped = config(activation="quick_geglu", clamp=0.5, linear_offset=1.0)
    expected = gate.clamp(max=0.5) * torch.sigmoid(1.702 * gate.clamp(max=0.5)) * (linear.clamp(-0.5, 0.5) + 1)
    close(formulas.activate(values, clamped), expected)
    parts = [torch.randn(2, LENGTH, heads, 8) for heads in (4, 2, 2)]
    torchs = [part.transpose(1, 2) for part in parts]
    expected = torch.nn.functional.scaled_dot_product_attention(*torchs, is_causal=True, enable_gqa=True)
    ours = formulas.attention(*parts, formulas.may_attend(LENGTH, None, values.device))
    close(ours, expected.transpose(1, 2).flatten(2))
    labels = torch.randint(HIDDEN, (2, 5))
    expected = torch.nn.functional.cross_entropy(values.flatten(0, 1), labels.flatten(), reduction="none")
    close(formulas.cross_entropy(values, labels).flatten(), expected)
    weight, bias = torch.randn(HIDDEN, 1, 4), torch.randn(HIDDEN)
    expected = torch.nn.functional.conv1d(values.transpose(1, 2), weight, bias, padding=3, groups=HIDDEN)[..., :5]
    same = formulas.may_attend(5, None, values.device)
    close(formulas.causal_convolution(values, weight, bias, same), expected.transpose(1, 2))


def rotation_depends_on_the_distance():
    query, key = torch.randn(2, 8)

    def score(first, second):
        at = torch.tensor([[first, second]])
        turned = rotate(torch.stack((query, key))[None, :, None], at, RotaryConfig())[0, :, 0]
        return float(turned[0] @ turned[1])

    assert math.isclose(score(9, 4), score(105, 100), rel_tol=1e-9)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-3)
    # Of the first pair, (0, 4), by one radian a position.
    turned = rotate(torch.eye(8)[0][None, None, None], torch.tensor([[1]]), RotaryConfig()).flatten()
    close(turned[[0, 4]], torch.tensor([math.cos(1), math.sin(1)]))


def positions_are_stretched():
    def angles(**more):
        turned = rotate(torch.eye(16)[:8, None][None], torch.ones(1, 8), RotaryConfig(base=5e5, **more))[0, :, 0]
        return torch.atan2(turned.diagonal(8), turned.diagonal()), turned.norm(dim=-1)

    plain = 5e5 ** (-torch.arange(8) / 8)
    close(angles()[0], plain)
    # Hugging Face's llama3: waves of 6 to 861 tokens stay, those of 22904 and longer are 8 times as long.
    llama3, _ = angles(scaling="llama3")
    close(llama3[:4], plain[:4])
    close(llama3[5:], plain[5:] / 8)
    smooth = (8192 * float(plain[4]) / (2 * math.pi) - 1) / 3
    close(llama3[4], (1 - smooth) * plain[4] / 8 + smooth * plain[4])
    # GPT-OSS: the pair that turns 32 times in 4096 tokens is number 1.84, the one that turns once 3.95.
    yarn, sizes = angles(scaling="yarn", factor=32.0, original_length=4096)
    close(yarn[:2], plain[:2])
    close(yarn[4:], plain[4:] / 32)
    first, last = (8 * math.log(4096 / (turns * 2 * math.pi)) / math.log(5e5) for turns in (32, 1))
    ramp = (3 - first) / (last - first)
    close(yarn[3], plain[3] * (1 - ramp) + plain[3] / 32 * ramp)
    close(sizes, torch.full((8,), 0.1 * math.log(32) + 1))
    # DeepSeek-V3's has whole pairs, 1 and 4, and leaves the sizes.
    yarn, sizes = angles(scaling="yarn", factor=32.0, original_length=4096, of_scores=True)
    close(yarn[3], plain[3] / 3 + plain[3] / 32 * 2 / 3)
    close(sizes, torch.ones(8))
    half = rotate(torch.ones(1, 1, 1, 16), torch.ones(1, 1), RotaryConfig(part=0.5)).flatten()
    assert (half[8:] == 1).all()
    assert (half[:8] != 1).all()


def windows_and_sinks_are_scores():
    same = formulas.may_attend(LENGTH, None, torch.device("cpu"))
    assert formulas.within_window(same, 3)[0].sum(-1).tolist() == [1, 2, 3, *[4] * (LENGTH - 3)]
    parts = [torch.randn(1, LENGTH, 4, 8) for _ in range(3)]
    sinks = torch.randn(4)
    # A sink is a token before all others, of a zero value, whose score is given.
    mask = torch.cat((sinks[None, :, None, None].expand(1, -1, LENGTH, 1), torch.zeros(1, 4, LENGTH, LENGTH)), -1)
    seen = torch.cat((torch.ones(LENGTH, 1, dtype=torch.bool), same[0]), -1)
    keys, values = (torch.cat((torch.zeros(1, 1, 4, 8), part), 1).transpose(1, 2) for part in parts[1:])
    expected = torch.nn.functional.scaled_dot_product_attention(
        parts[0].transpose(1, 2), keys, values, attn_mask=mask.masked_fill(~seen, -math.inf)
    )
    close(formulas.attention(*parts, same, sinks), expected.transpose(1, 2).flatten(2))
    every_second = config("TT", window=3, windowless=2)
    seen = ReferenceModel(every_second, {})
    seen._same = same
    assert seen._seen(0).sum() < seen._seen(1).sum()


def routers_of_deepseek_choose_by_bias_and_group():
    experts = ExpertsConfig(count=4, top_k=2, sigmoid=True, bias_rate=0.1, factor=2.5)
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
    scores = logits.sigmoid()
    weights, chosen, _ = route(logits, experts)
    assert chosen.flatten().tolist() == [1, 1, 0, 0]
    close(weights[..., :2], 2.5 * scores[..., :2] / scores[..., :2].sum())
    # A bias decides the choice, and is no part of the weights.
    weights, chosen, _ = route(logits, experts, torch.tensor([0.0, -0.5, 0.0, 0.0]))
    assert chosen.flatten().tolist() == [1, 0, 1, 0]
    close(weights[0, 0, 2], 2.5 * scores[0, 0, 2] / (scores[0, 0, 0] + scores[0, 0, 2]))
    # Of two groups the one with the larger sum of two.
    grouped = ExpertsConfig(count=4, top_k=2, sigmoid=True, groups=2, groups_top_k=1)
    assert route(torch.tensor([[[3.0, -9.0, 1.0, 0.9]]]), grouped)[1].flatten().tolist() == [0, 0, 1, 1]
    close(moved_bias(torch.zeros(4), torch.tensor([4.0, 2.0, 1.0, 1.0]), 0.1), torch.tensor([-0.1, 0.0, 0.1, 0.1]))
    # Two of four tokens are an equal share of two experts.
    dropping = ExpertsConfig(count=2, top_k=1, softmax_first=True, capacity=1.0)
    weights, _, _ = route(torch.tensor([[[4.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]), dropping)
    assert (weights > 0)[0].int().tolist() == [[1, 0], [1, 0], [0, 0], [0, 1]]


def latent_attention_is_attention_of_heads():
    latent = LatentConfig(rank=6, size=8, rotated=4)
    model = config(latent=latent, query_groups=4, rotary=RotaryConfig(scaling="yarn", factor=40.0, original_length=64,
                                                                      of_scores=True))  # fmt: skip
    name = "decoder.layers.0.self_attention"
    shapes = {"linear_q_down_proj": (5, HIDDEN), "linear_q_up_proj": (48, 5), "linear_kv_down_proj": (10, HIDDEN),
              "linear_kv_up_proj": (64, 6), "linear_proj": (HIDDEN, 32)}  # fmt: skip
    weights = {f"{name}.{part}.weight": torch.randn(shape) for part, shape in shapes.items()}
    weights |= {f"{name}.q_layernorm.weight": torch.ones(5), f"{name}.kv_layernorm.weight": torch.ones(6)}
    own, values = ReferenceModel(model, weights), torch.randn(1, 2, HIDDEN)
    own._note, own._positions = (lambda *_: None), torch.zeros(1, 2)
    same = formulas.may_attend(2, None, values.device)
    # Without positions: a head of the same queries and keys, and scores that are larger by the factor.
    ours = own._latent("decoder.layers.0", values, same, latent)
    low = torch.nn.functional.rms_norm(values @ weights[f"{name}.linear_q_down_proj.weight"].T, (5,), eps=1e-5)
    down = values @ weights[f"{name}.linear_kv_down_proj.weight"].T
    up = torch.nn.functional.rms_norm(down[..., :6], (6,), eps=1e-5) @ weights[f"{name}.linear_kv_up_proj.weight"].T
    queries = (low @ weights[f"{name}.linear_q_up_proj.weight"].T).unflatten(-1, (4, 12))
    keys = torch.cat((up.unflatten(-1, (4, 16))[..., :8], down[:, :, None, 6:].expand(-1, -1, 4, -1)), -1)
    parts = [part.transpose(1, 2) for part in (queries, keys, up.unflatten(-1, (4, 16))[..., 8:])]
    scale = (0.1 * math.log(40) + 1) ** 2 / math.sqrt(12)
    expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale)
    close(ours, expected.transpose(1, 2).flatten(2) @ weights[f"{name}.linear_proj.weight"].T)


def further_tokens_are_predicted_from_what_is_known():
    model = config(predicted=1, predicted_weight=0.3)
    whole = weights_of(model)
    layer = {name.replace("decoder.layers.0", "mtp.layers.0.transformer_layer"): value.clone()
             for name, value in whole.items() if "layers.0" in name}  # fmt: skip
    more = {f"mtp.layers.0.{norm}.weight": torch.ones(HIDDEN) for norm in ("enorm", "hnorm", "final_layernorm")}
    weights = {**whole, **layer, **more, "mtp.layers.0.eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.1}
    part = batch(2)
    _, once = ReferenceModel(model, weights).losses(part)
    # The last label is that of no token that is known, and has no part in it: another one changes nothing.
    other = MicroBatch(tokens=part.tokens, labels=torch.cat((part.labels[:, :1] * 0, part.labels[:, 1:]), 1))
    close(ReferenceModel(model, weights).losses(other)[1], once)
    other = MicroBatch(
        tokens=part.tokens, labels=torch.cat((part.labels[:, :-1], 1 - part.labels[:, -1:].clamp(0, 1)), 1)
    )
    assert not math.isclose(float(ReferenceModel(model, weights).losses(other)[1]), float(once), rel_tol=1e-6)
    # Its weight is of the gradient and not of the loss that is reported.
    trained = train(model, ADAM, weights, [[part]])
    assert math.isclose(trained.steps[0][0], float(ReferenceModel(model, weights).losses(part)[0].mean()))
    assert trained.gradients["mtp.layers.0.eh_proj.weight"].norm() > 0


def weights_are_drawn_as_configured():
    names = ("embedding.word_embeddings.weight", "a.linear_proj.weight", "a.linear_fc1.bias", "a.q_layernorm.weight")

    def problem(index=0, change=lambda value: value):
        drawn = [torch.randn(64, 64) * 0.05, torch.randn(64, 64) * 0.05 / math.sqrt(8), torch.zeros(8), torch.ones(8)]
        drawn[index] = change(drawn[index])
        return initial_problem(zip(names, drawn, strict=True), 0.05, layers=4)

    assert problem() is None
    assert problem(0, lambda value: value * 1.1).startswith("embedding.word_embeddings.weight has deviation 0.05")
    assert problem(1, lambda value: value * math.sqrt(8)).startswith("a.linear_proj.weight has deviation 0.05")
    assert problem(0, lambda value: value + 0.01).startswith("embedding.word_embeddings.weight has mean 0.0")
    assert problem(2, lambda value: value + 1) == "a.linear_fc1.bias is not 0 everywhere"
    assert problem(3, lambda value: value * 0) == "a.q_layernorm.weight is not 1 everywhere"


def state_space_is_its_recurrence():
    """h <- exp(dt A) h + dt B x; y = C h, token by token (Gu & Dao 2023, equation 2)."""
    inputs, steps = torch.randn(2, LENGTH, HEADS, 4), torch.rand(2, LENGTH, HEADS)
    decay, enter, leave = (
        -torch.rand(HEADS),
        torch.randn(2, LENGTH, GROUPS, STATE),
        torch.randn(2, LENGTH, GROUPS, STATE),
    )
    ours = formulas.state_space(inputs, steps, decay, (enter, leave), formulas.may_attend(LENGTH, None, inputs.device))
    state = torch.zeros(2, HEADS, 4, STATE)
    for at in range(LENGTH):
        own_enter, own_leave = (part[:, at].repeat_interleave(HEADS // GROUPS, 1) for part in (enter, leave))
        kept = state * (steps[:, at] * decay).exp()[..., None, None]
        state = kept + steps[:, at, :, None, None] * inputs[:, at, :, :, None] * own_enter[:, :, None]
        close(ours[:, at], (state * own_leave[:, :, None]).sum(-1))


def packed_sequences_are_separate_ones():
    model = config("TM*-", mamba=MAMBA)
    weights = weights_of(model)
    whole, first = batch(1), 5
    segments = (torch.arange(LENGTH) >= first).long()[None]
    together = MicroBatch(tokens=whole.tokens, labels=whole.labels, segments=segments)
    ours, _ = ReferenceModel(model, weights).losses(together)
    for part in (slice(0, first), slice(first, None)):
        alone = MicroBatch(tokens=whole.tokens[:, part], labels=whole.labels[:, part])
        close(ours[:, part], ReferenceModel(model, weights).losses(alone)[0])


def packed_samples_are_split_by_document():
    numbers = document_numbers(1, 1, 4, 64, packed=True)
    assert numbers.shape == (4, 64)
    assert (numbers[:, 0] == 0).all()
    assert (numbers[:, -1] > 0).all()
    assert (numbers.diff() >= 0).all()
    assert document_numbers(1, 2, 4, 64, packed=True).ne(numbers).any()
    assert not document_numbers(1, 1, 4, 64, packed=False).any()
    lengths = document_lengths(numbers)
    assert sum(lengths) == 4 * 64
    assert all(length % 4 == 0 for length in lengths)
    parts = [packed_part(lengths, rank, 2) for rank in range(2)]
    assert sorted(torch.cat(parts).tolist()) == list(range(4 * 64))
    # Of each document the first rank has the first and the last quarter.
    assert packed_part([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]


def optimizer_is_torchs():
    model = config("T", tied=False)
    weights = weights_of(model, **{"output_layer.weight": (VOCABULARY, HIDDEN)})
    optimizer = OptimizerConfig(
        learning_rate=1e-2,
        embedding_learning_rate=3e-2,
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-5,
        weight_decay=0.1,
        clip_norm=0.5,
    )
    steps = [[batch(), batch()] for _ in range(3)]
    trained = train(model, optimizer, weights, steps)
    own = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    groups = [
        {
            "params": [weight],
            "weight_decay": 0.1 if weight.dim() > 1 else 0.0,
            "lr": 3e-2 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 1e-2,
        }
        for name, weight in own.items()
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-5)
    for step, (loss, norm) in zip(steps, trained.steps, strict=True):
        adam.zero_grad()
        mean = sum(ReferenceModel(model, own).losses(part)[0].mean() for part in step) / 2
        mean.backward()
        close(
            torch.tensor([loss, norm]), torch.stack([mean.detach(), torch.nn.utils.clip_grad_norm_(own.values(), 0.5)])
        )
        assert norm > 0.5
        adam.step()
    for name, weight in own.items():
        close(trained.weights[name], weight.detach())


def schedules_are_torchs():
    """Warm-up from 0.1 for 3 steps, then each decay to 0.2 at step 9."""
    weight = torch.nn.Parameter(torch.zeros(1))
    for style, made in (
        ("cosine", lambda own: torch.optim.lr_scheduler.CosineAnnealingLR(own, 6, eta_min=0.2)),
        ("linear", lambda own: torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.2, 6)),
        ("constant", lambda own: torch.optim.lr_scheduler.ConstantLR(own, 1.0)),
    ):
        own = torch.optim.SGD([weight], lr=1.0)
        warmup = torch.optim.lr_scheduler.LinearLR(own, 0.1, 1.0, 3)
        both = torch.optim.lr_scheduler.SequentialLR(own, [warmup, made(own)], milestones=[3])
        schedule = ScheduleConfig(steps=9, style=style, warmup=3, first=0.1, decay=9, least=0.2)
        for step in range(10):
            assert math.isclose(learning_rate(schedule, 1.0, step), own.param_groups[0]["lr"], rel_tol=1e-9), style
            own.step()
            both.step()
        assert learning_rate(schedule, 1.0, 12) == (1.0 if style == "constant" else 0.2)
    stable = ScheduleConfig(steps=9, style="WSD", warmup=3, decay=9, wsd_decay=4, wsd_style="minus_sqrt")
    assert [learning_rate(stable, 1.0, step) for step in (3, 5, 6, 9)] == [1.0, 1.0, 0.5, 0.0]
    root = ScheduleConfig(steps=9, style="inverse-square-root", warmup=3, decay=99)
    assert learning_rate(root, 1.0, 12) == 0.5
    grows = ScheduleConfig(steps=4, first_weight_decay=0.1, weight_decay_style="cosine")
    decays = [weight_decay(grows, 0.3, step) for step in range(5)]
    close(torch.tensor(decays), 0.2 - 0.1 * torch.tensor([1.0, 0.5**0.5, 0.0, -(0.5**0.5), -1.0]))


def auxiliary_losses_are_of_a_micro_batch():
    logits = torch.randn(2, 3, 4)
    experts = ExpertsConfig(count=4, top_k=2, auxiliary=0.1, sequence_auxiliary=0.01, z=0.001)
    weights, _, auxiliary = route(logits, experts)
    scores, chosen = logits.softmax(-1), weights > 0
    assert (chosen.sum(-1) == 2).all()
    close(weights.sum(-1), torch.ones(2, 3))

    def balance(which):
        part, mean = chosen[which].double().flatten(0, -2).mean(0) / 2, scores[which].flatten(0, -2).mean(0)
        return 4 * float((part * mean).sum())

    expected = 0.1 * balance(slice(None)) + 0.01 * (balance(0) + balance(1)) / 2
    close(auxiliary, torch.tensor(expected) + 0.001 * logits.logsumexp(-1).square().mean())
    # They are in the gradients and not in the loss, and joining micro batches would change them.
    model = config("T", experts=experts)
    own, parts = weights_of(model), [batch(1), batch(1)]
    trained = train(model, ADAM, own, [parts])
    leaves = {name: weight.clone().requires_grad_() for name, weight in own.items()}
    both = [ReferenceModel(model, leaves).losses(part) for part in parts]
    (sum(tokens.mean() + auxiliary for tokens, auxiliary in both) / 2).backward()
    close(trained.gradients["decoder.layers.0.mlp.router.weight"], leaves["decoder.layers.0.mlp.router.weight"].grad)
    close(torch.tensor(trained.steps[0][0]), sum(tokens.mean() for tokens, _ in both).detach() / 2)


def masks_weigh_tokens():
    model = config("T")
    weights, mask = weights_of(model), torch.ones(1, LENGTH)
    mask[:, 3:] = 0
    parts = [batch(1, loss_mask=mask), batch(1)]
    tokens = [ReferenceModel(model, weights).losses(part)[0] for part in parts]
    means = float((tokens[0][:, :3].mean() + tokens[1].mean()) / 2)
    whole = float((tokens[0][:, :3].sum() + tokens[1].sum()) / (3 + LENGTH))
    for per_token, expected in ((False, means), (True, whole)):
        optimizer = OptimizerConfig(learning_rate=1e-2, clip_norm=1.0, per_token_loss=per_token)
        assert math.isclose(train(model, optimizer, weights, [parts]).steps[0][0], expected, rel_tol=1e-12)
    experts = config("T", experts=ExpertsConfig(count=4, top_k=2, z=0.1))
    words = "the weight of router losses is not defined where tokens are masked and counted"
    assert refusal(experts, weights_of(experts), [[batch(1, loss_mask=mask)]], optimizer) == words


def tensors_that_do_not_fit_are_not_compared():
    model = config("TM", mamba=MAMBA)
    weights = weights_of(model)
    train(model, ADAM, weights, [[batch()]])
    lacking = {name: weight for name, weight in weights.items() if name != "decoder.layers.0.mlp.linear_fc2.weight"}
    surplus = {**weights, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": torch.randn(4, 4)}
    unknown = config("M")
    for own, used, words in (
        (lacking, model, "no decoder.layers.0.mlp.linear_fc2.weight"),
        (surplus, model, "that the reference has not: decoder.layers.0.mlp.shared_experts.linear_fc1.weight"),
        (weights_of(unknown), unknown, "Mamba layers of unknown sizes"),
    ):
        assert words in refusal(used, own)


def refusal(model, weights, steps=None, optimizer=ADAM):
    try:
        train(model, optimizer, weights, steps or [[batch()]])
    except NotComparedError as error:
        return str(error)
    return ""


def nothing_of_megatron_is_loaded():
    assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "transformer_engine")]


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


CHECKS = (
    formulas_are_torchs,
    rotation_depends_on_the_distance,
    positions_are_stretched,
    windows_and_sinks_are_scores,
    routers_of_deepseek_choose_by_bias_and_group,
    latent_attention_is_attention_of_heads,
    further_tokens_are_predicted_from_what_is_known,
    weights_are_drawn_as_configured,
    state_space_is_its_recurrence,
    packed_sequences_are_separate_ones,
    packed_samples_are_split_by_document,
    optimizer_is_torchs,
    schedules_are_torchs,
    auxiliary_losses_are_of_a_micro_batch,
    masks_weigh_tokens,
    tensors_that_do_not_fit_are_not_compared,
    nothing_of_megatron_is_loaded,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
