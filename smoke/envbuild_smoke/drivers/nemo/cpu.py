"""What NeMo asks of CUDA beyond megatron-core (`envbuild_smoke.cpu_shim`), answered from the CPU."""

from typing import Any

import torch
from nemo.lightning.io import pl
from torch.distributed.device_mesh import DeviceMesh

from envbuild_smoke.drivers.imports import no_capability
from envbuild_smoke.drivers.parts import State

_ORIGINAL_TO = torch.Tensor.to
_ORIGINAL_MESH = DeviceMesh.from_group


def _to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Call Tensor.to: the CPU replaces any CUDA device."""
    arguments = tuple("cpu" if str(each).startswith("cuda") else each for each in arguments)
    if str(options.get("device", "")).startswith("cuda"):
        options["device"] = "cpu"
    return _ORIGINAL_TO(tensor, *arguments, **options)


def _no_stream(*_arguments: object, **_options: object) -> None:
    """Return no stream, which torch.cuda.stream takes for the one at hand."""


def _mesh(group: Any, _device_type: str, *arguments: Any, **options: Any) -> DeviceMesh:
    """Call DeviceMesh.from_group for the CPU."""
    return _ORIGINAL_MESH(group, "cpu", *arguments, **options)


def _as_loaded(checkpoint: State) -> State:
    """Return a checkpoint, whose tensors NeMo moves to the GPU."""
    return checkpoint


def install() -> None:
    """Put the redirects in place in this process."""
    torch.Tensor.to = _to
    # MegatronCommOverlapCallback asks for it.
    torch.cuda.get_device_capability = no_capability
    torch.cuda.Stream = _no_stream
    # A checkpoint's tensors and optimizer go to the GPU.
    DeviceMesh.from_group = _mesh
    pl._fix_tensors_device = _as_loaded
