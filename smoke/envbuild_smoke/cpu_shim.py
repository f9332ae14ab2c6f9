"""Redirects calls that name CUDA to the CPU, so that megatron-core trains without a GPU.

megatron-core asks for device="cuda" in places that have nothing to do with kernels: counters, masks, the
random state, the gradient norm. On a plan with device "cpu" these calls are answered from the CPU. Device
names change and nothing else: no arithmetic, no schedule, no communication. `PATCHED` lists every symbol,
and the environment record carries their names.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Redirect:
    """A symbol ("module.attribute"), why it is redirected, and what is called in its place, with the original first."""

    symbol: str
    reason: str
    replacement: Callable[..., Any]


def _on_cpu(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that takes `device`: the CPU replaces any CUDA device."""
    # torch takes the device of these functions by keyword alone.
    if str(options.get("device", "")).startswith("cuda"):
        options["device"] = "cpu"
    # Pinned memory is for copies to a GPU, and torch has none without one.
    options.pop("pin_memory", None)
    return original(*arguments, **options)


def _cpu_device(_original: object) -> Any:
    import torch

    return torch.device("cpu")


def _nothing(*_arguments: object, **_options: object) -> None:
    """Do nothing."""


def _itself(_original: object, tensor: Any, *_arguments: object, **_options: object) -> Any:
    return tensor


def _cpu_random_state(*_arguments: object, **_options: object) -> Any:
    import torch

    return torch.default_generator.get_state()


def _set_cpu_random_state(_original: object, state: Any, *_arguments: object, **_options: object) -> None:
    import torch

    torch.default_generator.set_state(state)


def _seed_cpu(_original: object, seed: int) -> None:
    import torch

    torch.default_generator.manual_seed(seed)


def _cuda_type_name(original: Callable[..., Any], tensor: Any, *arguments: Any, **options: Any) -> Any:
    """Return "torch.cuda.FloatTensor" where `tensor.type()` returns "torch.FloatTensor"."""
    answer = original(tensor, *arguments, **options)
    # With a dtype, `Tensor.type` converts and returns a tensor: only the name is changed.
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


def _as_written(_original: object, function: "Callable[..., Any] | None" = None, **_options: object) -> Any:
    """Return the function itself, or what takes it where `torch.compile` was called with options alone."""
    return function if function is not None else lambda decorated: decorated


def _averaged(original: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Sum what is divided by the number of ranks first."""
    import torch

    if options.get("op") == torch.distributed.ReduceOp.AVG:
        tensors[-1].div_(torch.distributed.get_world_size(options.get("group")))
        options["op"] = torch.distributed.ReduceOp.SUM
    return original(*tensors, **options)


# Each of these was taken out in turn. Without any but two, training fails; without the two that seed and set
# random states it goes on, with states that are not those of the tracker.
PATCHED: tuple[Redirect, ...] = (
    # Before megatron-core is imported, which keeps these three by other names.
    Redirect("torch.compile", "fused functions run as they are written: compiling takes minutes", _as_written),
    Redirect("torch.distributed.all_reduce", "gloo sums, and does not average", _averaged),
    Redirect("torch.distributed.reduce_scatter_tensor", "gloo sums, and does not average", _averaged),
    Redirect("torch.zeros", "token counters of the schedules and of the gradient norm", _on_cpu),
    Redirect("torch.ones", "the causal mask of the attention", _on_cpu),
    Redirect("torch.tensor", "the gradient norm, the loss scale and flags of the checkpoint", _on_cpu),
    Redirect("torch.cuda.current_device", "the device that buffers and received tensors are made on", _cpu_device),
    Redirect("torch.cuda.synchronize", "waits for the GPU around communication; the CPU is never behind", _nothing),
    Redirect("torch.cuda.current_stream", "waits for events of gradients, of which there are none (0.19)", _nothing),
    Redirect("torch.cuda.get_rng_state", "the tracker of random states under tensor parallelism", _cpu_random_state),
    Redirect("torch.cuda.random.get_rng_state", "the same function under its other name", _cpu_random_state),
    Redirect("torch.cuda.manual_seed", "seeds the random states that the tracker keeps", _seed_cpu),
    Redirect(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        "puts a tracked random state into effect",
        _set_cpu_random_state,
    ),
    Redirect("torch.Tensor.type", "the gradient clipping asserts that gradients are CUDA tensors", _cuda_type_name),
    Redirect("torch.Tensor.cuda", "moves tensors to the GPU after loading", _itself),
)


def install() -> None:
    """Put every redirect of `PATCHED` in place, once, in this process."""
    for redirect in PATCHED:
        owner_name, _, attribute = redirect.symbol.rpartition(".")
        owner = _resolve(owner_name)
        original = getattr(owner, attribute)
        # Patched twice, Tensor.type would answer "torch.cuda.cuda.FloatTensor".
        if getattr(original, "_envbuild_redirect", False):
            continue
        setattr(owner, attribute, _replaced(original, redirect.replacement))


def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    # Not functools.partial: it is no descriptor, and as an attribute of Tensor would not get the tensor.
    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return replacement(original, *arguments, **options)

    wrapper._envbuild_redirect = True  # type: ignore[attr-defined]
    return wrapper


def _resolve(name: str) -> Any:
    """Return the module or class of this dotted name."""
    try:
        # "torch.Tensor" is a class, and cannot be imported: its owner is, and the class is an attribute of that.
        return importlib.import_module(name)
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(owner), attribute)
