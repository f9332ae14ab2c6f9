"""Show that Transformer Engine loses the gradient of a layer norm's output that it returns gathered.

torchrun --nproc-per-node 2 gathered_layernorm_output.py

Two ranks split a LayerNormLinear by its columns, with sequence parallelism. The loss is made of both of its outputs, as
LoRA's adapters do: the linear layer's, and the norm's. The gradient of the input is compared with that of the whole
layer in plain PyTorch.
"""

import os
import sys

import torch
import transformer_engine
import transformer_engine.pytorch as te

SEQUENCE, BATCH, HIDDEN, OUT = 32, 2, 64, 128
# Name, whether the norm's output is returned gathered.
WAYS = (("returned as it is split", False), ("returned gathered", True))


def whole(inputs, weight, by_linear, by_norm):
    """Return the gradient of the input of the whole layer, in plain PyTorch."""
    inputs = inputs.clone().requires_grad_()
    norm = torch.nn.functional.rms_norm(inputs, (HIDDEN,), eps=1e-5)
    loss = (torch.nn.functional.linear(norm, weight) * by_linear).sum() + (norm * by_norm).sum()
    return torch.autograd.grad(loss, inputs)[0]


def split(inputs, weight, by_linear, by_norm, *, gathered, rank):
    """Return the same gradient, of this rank's part of the sequence, with two ranks and Transformer Engine."""
    rows = slice(rank * SEQUENCE // 2, (rank + 1) * SEQUENCE // 2)
    columns = slice(rank * OUT // 2, (rank + 1) * OUT // 2)
    layer = te.LayerNormLinear(
        HIDDEN,
        OUT,
        eps=1e-5,
        bias=False,
        normalization="RMSNorm",
        sequence_parallel=True,
        tp_group=torch.distributed.group.WORLD,
        tp_size=2,
        parallel_mode="column",
        params_dtype=torch.float32,
        return_layernorm_output=True,
        return_layernorm_output_gathered=gathered,
    )
    with torch.no_grad():
        layer.weight.copy_(weight[columns])
    own = inputs[rows].clone().requires_grad_()
    linear, norm = layer(own)
    # Each rank computes a share of what the norm's output is used for, as with an adapter that is split: half of the
    # loss of all rows, or where the rank has only its own rows, the whole loss of those.
    by_norm = by_norm / 2 if gathered else by_norm[rows]
    loss = (linear * by_linear[..., columns]).sum() + (norm * by_norm).sum()
    return torch.autograd.grad(loss, own)[0], rows


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    if torch.distributed.get_world_size() != 2:
        sys.exit("start it with: torchrun --nproc-per-node 2")
    torch.manual_seed(1)
    shapes = ((SEQUENCE, BATCH, HIDDEN), (OUT, HIDDEN), (SEQUENCE, BATCH, OUT), (SEQUENCE, BATCH, HIDDEN))
    inputs, weight, by_linear, by_norm = (torch.randn(shape, device="cuda") for shape in shapes)
    expected = whole(inputs, weight, by_linear, by_norm)
    without = whole(inputs, weight, by_linear, torch.zeros_like(by_norm))
    if rank == 0:
        print(f"transformer-engine {transformer_engine.__version__}, torch {torch.__version__}, NCCL")
    for name, gathered in WAYS:
        found, rows = split(inputs, weight, by_linear, by_norm, gathered=gathered, rank=rank)
        off = [((found - other[rows]).norm() / other[rows].norm()).item() for other in (expected, without)]
        if rank == 0:
            verdict = "agrees" if off[0] < 1e-2 else "WRONG"
            print(
                f"{name}: {verdict}, off by {off[0]:.1e}; by {off[1]:.1e} from the gradient of the linear output alone"
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
