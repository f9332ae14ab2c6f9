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

Replacement = Callable[[Any], Any]


@dataclass(frozen=True)
class Redirect:
    """A symbol ("module.attribute"), why it is redirected, and how its replacement is made."""

    symbol: str
    reason: str
    replacement: Replacement


def _on_cpu(original: Any) -> Any:
    """Wrap a function that takes `device`: the CPU replaces any CUDA device."""

    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        # torch takes the device of these functions by keyword alone.
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        # Pinned memory is for copies to a GPU, and torch has none without one.
        options.pop("pin_memory", None)
        return original(*arguments, **options)

    return wrapper


def _cpu_device(_original: Any) -> Any:
    import torch

    return lambda: torch.device("cpu")


def _nothing(_original: Any) -> Any:
    return lambda *_arguments, **_options: None


def _itself(_original: Any) -> Any:
    return lambda tensor, *_arguments, **_options: tensor


def _cpu_random_state(_original: Any) -> Any:
    import torch

    return lambda *_arguments, **_options: torch.default_generator.get_state()


def _set_cpu_random_state(_original: Any) -> Any:
    import torch

    return lambda state, *_arguments, **_options: torch.default_generator.set_state(state)


def _seed_cpu(_original: Any) -> Any:
    import torch

    def seed_cpu(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return seed_cpu


def _cuda_type_name(original: Any) -> Any:
    """Make `tensor.type()` answer "torch.cuda.FloatTensor" where it would answer "torch.FloatTensor"."""

    @functools.wraps(original)
    def wrapper(tensor: Any, *arguments: Any, **options: Any) -> Any:
        answer = original(tensor, *arguments, **options)
        if arguments or options or not isinstance(answer, str):
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    return wrapper


# Each of these was taken out in turn. Without any but two, training fails; without the two that seed and set
# random states it goes on, with states that are not those of the tracker.
PATCHED: tuple[Redirect, ...] = (
    Redirect("torch.zeros", "token counters of the schedules and of the gradient norm", _on_cpu),
    Redirect("torch.ones", "the causal mask of the attention", _on_cpu),
    Redirect("torch.tensor", "the gradient norm, the loss scale and flags of the checkpoint", _on_cpu),
    Redirect("torch.cuda.current_device", "the device that buffers and received tensors are made on", _cpu_device),
    Redirect("torch.cuda.synchronize", "waits for the GPU around communication; the CPU is never behind", _nothing),
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
        replacement = redirect.replacement(original)
        replacement._envbuild_redirect = True
        setattr(owner, attribute, replacement)


def _resolve(name: str) -> Any:
    """Return the module or class of this dotted name."""
    try:
        # "torch.Tensor" is a class, and cannot be imported: its owner is, and the class is an attribute of that.
        return importlib.import_module(name)
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(owner), attribute)
