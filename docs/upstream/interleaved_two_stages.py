"""Show that megatron-core trains wrongly with two interleaved pipeline stages and its default settings.

torchrun --nproc-per-node 2 interleaved_two_stages.py

A small GPT trains on the same tokens from the same weights: as one process, and in two stages with and without
virtual stages. On two GPUs it uses NCCL, elsewhere the CPU and gloo.
"""

import functools
import os
import sys
import warnings

import torch

warnings.simplefilter("ignore")

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.package_info import __version__  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 4, 64, 4, 512, 32
MICRO_BATCHES, MICRO_BATCH_SIZE, STEPS = 8, 2, 5

BATCHED = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
NEITHER = {"overlap_p2p_comm": False, "batch_p2p_comm": False}
# Name, pipeline size, virtual stages, point-to-point settings.
LAYOUTS = (
    ("one process", 1, 1, BATCHED),
    ("PP 2", 2, 1, BATCHED),
    ("PP 2 x VP 2, defaults", 2, 2, BATCHED),
    ("PP 2 x VP 2, overlap_p2p_comm", 2, 2, OVERLAPPED),
    ("PP 2 x VP 2, neither", 2, 2, NEITHER),
)


def redirect_to_cpu() -> None:
    """Answer megatron-core's calls that name CUDA from the CPU; communication and arithmetic stay its own."""
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, functools.partial(_on_cpu, getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state = lambda *_, **__: torch.default_generator.get_state()
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    tensor_parallel.random._set_cuda_rng_state = lambda state, *_, **__: torch.default_generator.set_state(state)


def _on_cpu(original, *arguments, **options):
    if str(options.get("device", "")).startswith("cuda"):
        options["device"] = "cpu"
    return original(*arguments, **options)


def build(pipeline, virtual, settings, device):
    """Return this rank's chunks of the model."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **settings,
    )
    chunks = []
    for stage in range(virtual):
        vp_stage = stage if virtual > 1 else None
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunks.append(chunk.to(device))
    return chunks


def named(chunk):
    """Yield each parameter with its name in the whole model."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            yield f"decoder.layers.{numbers[int(index)]}.{rest}", parameter
        else:
            yield name, parameter


def forward_step(tokens, model):
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(inputs)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(inputs, positions, mask, labels=labels)
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def train(layout, weights, device):
    """Return the loss of a forward pass alone, and loss and gradient norm of every step; the same on both ranks."""
    _, pipeline, virtual, settings = layout
    chunks = build(pipeline, virtual, settings, device)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in named(chunk):
                parameter.copy_(weights.setdefault(name, parameter.detach().clone()))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, MICRO_BATCH_SIZE, SEQUENCE + 1), generator=generator).to(device)

    def run(forward_only):
        reports = get_forward_backward_func()(
            forward_step_func=lambda data, model: forward_step(next(data), model),
            data_iterator=[iter(tokens) for _ in chunks] if virtual > 1 else iter(tokens),
            model=chunks if virtual > 1 else chunks[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=forward_only,
        )
        loss = torch.stack([report["loss"] for report in reports]).mean() if reports else torch.zeros((), device=device)
        squares = sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)
        total = torch.stack([loss.double(), torch.as_tensor(squares, dtype=torch.float64, device=device)])
        if pipeline > 1:  # Only the last stage has the loss, and each has its own parameters.
            torch.distributed.all_reduce(total)
        return total[0].item(), total[1].sqrt().item()

    forward_loss, _ = run(forward_only=True)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        steps.append(run(forward_only=False))
        optimizer.step()
    return forward_loss, steps


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= 2
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        redirect_to_cpu()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if torch.distributed.get_world_size() != 2:
        sys.exit("start it with: torchrun --nproc-per-node 2")
    weights, expected = {}, None
    if rank == 0:
        print(f"megatron-core {__version__}, torch {torch.__version__}, {'NCCL' if on_gpu else 'CPU, gloo'}")
    for layout in LAYOUTS:
        forward_loss, steps = train(layout, weights, device)
        expected = expected or (forward_loss, steps)
        agrees = torch.allclose(torch.tensor(steps), torch.tensor(expected[1]), rtol=1e-3, atol=0)
        if rank == 0:
            print(f"\n{layout[0]}: {'agrees' if agrees else 'WRONG'}")
            print(f"  forward only    {forward_loss:.4f}")
            print("  loss          ", *(f"{loss:9.4f}" for loss, _ in steps))
            print("  gradient norm ", *(f"{norm:9.4f}" for _, norm in steps), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
