"""What NeMo asks of CUDA beyond megatron-core (`envbuild_smoke.cpu_shim`), answered from the CPU."""

from typing import Any

import torch

from envbuild_smoke.drivers.nemo.imports import no_capability

_ORIGINAL_TO = torch.Tensor.to


def _to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call Tensor.to: the CPU replaces any CUDA device."""
    arguments = tuple("cpu" if str(each).startswith("cuda") else each for each in arguments)
    if str(options.get("device", "")).startswith("cuda"):
        options["device"] = "cpu"
    return _ORIGINAL_TO(tensor, *arguments, **options)


def _no_stream(*_arguments: object, **_options: object) -> None:
    """Return no stream, which torch.cuda.stream takes for the one at hand."""


def install() -> None:
    """Put the redirects in place in this process."""
    torch.Tensor.to = _to
    # MegatronCommOverlapCallback asks for it.
    torch.cuda.get_device_capability = no_capability
    torch.cuda.Stream = _no_stream
