"""What NeMo asks of CUDA beyond megatron-core (`envbuild_smoke.cpu_shim`), answered from the CPU."""

from typing import Any

import torch

_ORIGINAL_TO = torch.Tensor.to


def _to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call Tensor.to: the CPU replaces any CUDA device."""
    arguments = tuple("cpu" if str(each).startswith("cuda") else each for each in arguments)
    if str(options.get("device", "")).startswith("cuda"):
        options["device"] = "cpu"
    return _ORIGINAL_TO(tensor, *arguments, **options)


def _no_stream(*_arguments: object, **_options: object) -> None:
    """Return no stream, which torch.cuda.stream takes for the one at hand."""


def _no_capability(*_arguments: object, **_options: object) -> tuple[int, int]:
    """Return a compute capability that no GPU has; NeMo's MegatronCommOverlapCallback asks for it."""
    return 0, 0


def install() -> None:
    """Put the redirects in place in this process."""
    torch.Tensor.to = _to
    torch.cuda.get_device_capability = _no_capability
    torch.cuda.Stream = _no_stream
