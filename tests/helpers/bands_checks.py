"""Checks of what bands are measured with, run by the Python of a stack."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from envbuild_smoke.drivers.mcore.gradients import PROJECTIONS, _numbers
from envbuild_smoke.drivers.mcore.observed_config import _main_weights, _narrowest, layer_spec, named_modules
from envbuild_smoke.drivers.mcore.perturbation import largest_difference, mantissa_bits, move_weights
from envbuild_smoke.drivers.recipe_training import INITIAL_DEVIATION, fill_zeros

torch.manual_seed(1)


def moved(values, bits, seed=0):
    module = torch.nn.ParameterList([values.clone()])
    move_weights(module, bits, seed)
    return module[0].detach()


def weights_move_by_one_unit_in_the_last_place():
    values = torch.randn(4096)
    values[:3] = torch.tensor([0.0, 1.0, -1.5])
    for bits, dtype in ((23, torch.float32), (10, torch.float32), (7, torch.bfloat16), (3, torch.bfloat16)):
        before = values.to(dtype)
        step = moved(before, bits).double() - before.double()
        unit = 2.0 ** (torch.log2(before.double().abs()).floor() - bits)
        assert step[0] == 0
        # What moves past a power of two is rounded to the type that it is stored in.
        assert ((step[1:].abs() - unit[1:]).abs() <= unit[1:] / 16).all(), bits
        assert 0.45 < (step[1:] > 0).double().mean() < 0.55
    assert torch.equal(moved(values, 23), moved(values, 23))
    assert not torch.equal(moved(values, 23), moved(values, 23, seed=1))


def bits_are_those_of_the_matrix_products():
    local, engine = (SimpleNamespace(layer_spec=name, mamba=None) for name in ("local", "transformer-engine"))
    mamba = SimpleNamespace(layer_spec="local", mamba=object())
    bits = [mantissa_bits(SimpleNamespace(precision="fp32"), model) for model in (local, engine, mamba)]
    assert bits == [23, 10, 10]
    assert [mantissa_bits(SimpleNamespace(precision=name), local) for name in ("bf16", "fp8")] == [7, 3]


def largest_difference_is_relative_to_each_tensor():
    own = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([100.0])}
    assert largest_difference(own, {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([101.0])}) == 0.1
    assert largest_difference({"a": torch.zeros(1)}, {"a": torch.full((1,), 0.25)}) == 0.25


def numbers_of(gradient, *cuts):
    """The sum over the shards of a gradient of two dimensions, cut at these rows and columns."""
    rows, columns = ([0, *own, size] for own, size in zip(cuts or ((), ()), gradient.shape, strict=True))
    total = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            part = gradient[top:bottom, left:right]
            shard = SimpleNamespace(
                data=part, prepend_axis_num=0, global_offset=(top, left), global_shape=gradient.shape
            )
            total += _numbers(shard)
    return total


def numbers_do_not_depend_on_the_shards():
    gradient = torch.randn(64, 48, dtype=torch.float64)
    whole = numbers_of(gradient)
    torch.testing.assert_close(numbers_of(gradient, (16, 40), (24,)), whole)
    torch.testing.assert_close(whole[0], gradient.square().sum())
    # Of an expert, one of many in a tensor with a dimension more.
    expert = ShardedTensor.from_rank_offsets("e", gradient, (0, 1, 3), prepend_axis_num=1)
    other = ShardedTensor.from_rank_offsets("e", gradient, (0, 2, 3), prepend_axis_num=1)
    assert not torch.allclose(_numbers(expert)[1:], _numbers(other)[1:])


def projections_are_as_far_apart_as_gradients():
    gradient = torch.randn(64, 48, dtype=torch.float64)
    ratios = []
    for _ in range(64):
        change = torch.randn(64, 48, dtype=torch.float64) * 1e-3
        apart = numbers_of(gradient + change)[1:] - numbers_of(gradient)[1:]
        ratios.append(float(apart.square().mean().sqrt() / change.norm()))
        assert len(set(apart.tolist())) == PROJECTIONS
    # The mean of the root of a mean of four squares is 0.94 of the root.
    assert 0.85 < sum(ratios) / len(ratios) < 1.05, sum(ratios) / len(ratios)
    # Elements that change places change the projections, and not the norm.
    swapped = numbers_of(gradient.flip(0))
    torch.testing.assert_close(swapped[0], numbers_of(gradient)[0])
    assert (swapped[1:] - numbers_of(gradient)[1:]).abs().min() > 1e-3


class RowParallelLinear(torch.nn.Linear):
    """Known by its name, as Megatron's own."""


def adapters_are_no_layers_of_the_model():
    model = torch.nn.ModuleDict({"adapter": torch.nn.ModuleDict({"linear_out": RowParallelLinear(2, 2)})})
    assert layer_spec([module for _, module in named_modules([model])]) == ""
    model["linear_proj"] = RowParallelLinear(2, 2)
    assert layer_spec([module for _, module in named_modules([model])]) == "local"


def weights_that_begin_at_zero_are_filled():
    def filled():
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 4096)
        torch.nn.init.zeros_(model.bias)
        before = model.weight.detach().clone()
        fill_zeros([model], 1234)
        assert torch.equal(model.weight, before)
        return model.bias.detach()

    assert abs(float(filled().std()) / INITIAL_DEVIATION - 1) < 0.1
    assert torch.equal(filled(), filled())


def main_weights_are_those_that_an_optimizer_keeps():
    class Optimizer:
        """As Transformer Engine's FusedAdam: what float32 has beyond the weights in bf16 is in its state."""

        def __init__(self, weight, kept):
            self.param_groups, self.state = [{"params": [weight]}], {weight: {"master_param": kept}}

    exact = torch.randn(1000, dtype=torch.float32)
    bits = exact.view(torch.int32)
    upper = (bits + 2**15) >> 16
    weight, kept = upper.short().view(torch.bfloat16), (bits - (upper << 16)).short()
    (whole,) = _main_weights(Optimizer(weight, kept))
    assert torch.equal(whole, exact)
    assert _narrowest(_main_weights(Optimizer(weight, kept))) == "float32"
    assert _narrowest(_main_weights(Optimizer(weight, torch.zeros_like(kept)))) == "bfloat16"
    assert _narrowest(_main_weights(Optimizer(weight, None))) == "bfloat16"


CHECKS = (
    main_weights_are_those_that_an_optimizer_keeps,
    weights_move_by_one_unit_in_the_last_place,
    bits_are_those_of_the_matrix_products,
    largest_difference_is_relative_to_each_tensor,
    numbers_do_not_depend_on_the_shards,
    projections_are_as_far_apart_as_gradients,
    adapters_are_no_layers_of_the_model,
    weights_that_begin_at_zero_are_filled,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
