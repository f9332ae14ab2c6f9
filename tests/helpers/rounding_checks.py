"""Checks of the reference's rounding against torch's own types, run by the Python of a stack."""

from __future__ import annotations

import torch

from envbuild_smoke.reference import formulas
from envbuild_smoke.reference.fp8 import Fp8, by_row, by_square, by_tensor
from envbuild_smoke.reference.rounding import Rounding, product

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)


def tensors():
    return torch.randn(2, 24, 256), (torch.randn(64, 256) * 0.02).requires_grad_()


def is_in_bf16(values):
    return bool((values == values.bfloat16().double()).all())


def product_is_that_of_bf16():
    values, weight = tensors()
    values.requires_grad_()
    theirs = (values.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().double()
    with Rounding(torch.bfloat16) as rounding:
        same = product(rounding.rounded(values), weight)
    assert float((same == theirs).double().mean()) > 0.99
    assert error(values @ weight.T, theirs) > 1e-3
    same.sum().backward()
    assert is_in_bf16(weight.grad)
    assert is_in_bf16(values.grad)


def nothing_is_rounded_outside():
    values, weight = tensors()
    assert torch.equal(product(values, weight), values @ weight.T)
    with Rounding(torch.bfloat16):
        assert not is_in_bf16(values * 1.1)  # does not follow from weights
    assert not is_in_bf16(values @ weight.T)


def formulas_round_what_they_give_and_losses_stay():
    values, weight = tensors()
    ones, labels = torch.ones(64), torch.randint(64, (2, 24))
    with Rounding(torch.bfloat16):
        logits = product(values, weight)
        normalized = formulas.rms_norm(logits, ones, 1e-5)
        losses = formulas.cross_entropy(logits, labels)
    assert is_in_bf16(logits)
    # In one go: rounded once, and not at each operation inside.
    assert torch.equal(normalized, formulas.rms_norm(logits, ones, 1e-5).bfloat16().double())
    assert torch.equal(losses, formulas.cross_entropy(logits, labels))
    assert not is_in_bf16(losses)


def error(ours, exact):
    return float(((ours - exact).norm() / exact.norm()).detach())


def scales_of_fp8_are_of_a_tensor_or_of_a_block():
    values = torch.randn(200, 300)
    values[:, :128] *= 1e-6
    for dtype, least, most in ((torch.float8_e4m3fn, 0.02, 0.04), (torch.float8_e5m2, 0.04, 0.08)):
        for scaled in (by_row, by_square):
            assert least < error(scaled(values, dtype)[:, :128], values[:, :128]) < most
        assert least < error(by_tensor(values, dtype), values) < most
        assert not by_tensor(torch.zeros(2, 2), dtype).any()
    # Small ones next to large ones are lost.
    assert error(by_tensor(values, torch.float8_e4m3fn)[:, :128], values[:, :128]) > 0.5
    # A block of a square has one scale, and a row its own.
    values = torch.randn(128, 128)
    values[0] *= 1e-6
    assert error(by_row(values, torch.float8_e4m3fn)[0], values[0]) < 0.04
    assert error(by_square(values, torch.float8_e4m3fn)[0], values[0]) > 0.5


def fp8_multiplies_values_weights_and_gradients():
    # Gradients of 1e-6 are far below the format's least: without a scale they would be zero.
    for recipe, of_gradients in (("delayed", (0.04, 0.08)), ("blockwise", (0.02, 0.05))):
        values, weight = tensors()
        gradient = torch.randn(2, 24, 64) * 1e-6
        values.requires_grad_()
        with Fp8(recipe):
            ours = product(values, weight)
        ours.backward(gradient)
        assert 0.02 < error(ours, values @ weight.T) < 0.05
        least, most = of_gradients
        assert least < error(values.grad, gradient @ weight) < most
        assert least < error(weight.grad, gradient.flatten(0, 1).T @ values.flatten(0, 1)) < most


CHECKS = (
    product_is_that_of_bf16,
    nothing_is_rounded_outside,
    formulas_round_what_they_give_and_losses_stay,
    scales_of_fp8_are_of_a_tensor_or_of_a_block,
    fp8_multiplies_values_weights_and_gradients,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
