"""What an image requires of the node that starts it, and what of a target decides an image.

NVIDIA's container runtimes, and enroot's hook for NVIDIA, read ``NVIDIA_REQUIRE_*`` from the image's environment and
refuse to start it where one does not hold. A space is an "or", a comma an "and"; all variables must hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.core.digests import Json
from envbuild.wheels.architectures import Architectures, first_and_last

CUDA, ARCH, DRIVER = "NVIDIA_REQUIRE_CUDA", "NVIDIA_REQUIRE_ARCH", "NVIDIA_REQUIRE_DRIVER"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
# compute: libcuda; utility: nvidia-smi and NVML, which NCCL asks.
_SEEN = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_LEAST_CUDA = re.compile(r"cuda>=(\d+)(\.\d+)?(,|\s|$)")


def target_key(target: Target) -> dict[str, Json]:
    """What of a target decides its images. Its name and its summary do not: two with the same have one image."""
    return {
        "device": target.device.value,
        "platform": target.platform,
        "sm": list(target.sm),
        "ptx": target.ptx,
        "driver": target.driver,
    }


def hardware_of(target: Target) -> str:
    """The hardware that an image is for, as text without the target's name."""
    machine = "" if target.platform == "linux/amd64" else f", {target.platform}"
    if target.device is Device.CPU:
        return f"CPUs{machine}"
    return f"{Architectures.for_target(target).text()}{machine}"


def variables(target: Target, cuda: str | None, base: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
    """The variables that make a node without the GPU or the driver refuse; none on a CPU.

    Args:
        cuda: the CUDA that the environment's packages are for, major.minor.
        base: the base's own variables.
    """
    if target.device is Device.CPU or cuda is None:
        return {}
    required = {CUDA: _cuda(target, cuda, base.get(CUDA, "")), ARCH: _arch(target)}
    if target.driver is not None:
        required[DRIVER] = f"driver>={target.driver}"
    # A base that wants more of the driver, as video, states it in these variables: its values stay.
    return {**{name: base.get(name, value) for name, value in _SEEN.items()}, **required}


def labels(required: Mapping[str, str]) -> dict[str, str]:
    """The requirements among :func:`variables` as labels of an image."""
    beginning = "NVIDIA_REQUIRE_"
    return {
        f"envbuild.require.{name.removeprefix(beginning).lower()}": value
        for name, value in required.items()
        if name.startswith(beginning)
    }


def _cuda(target: Target, cuda: str, base: str) -> str:
    """The CUDA that the driver must have.

    A program for 13.x runs on every driver that has 13.0 (CUDA compatibility guide, "Minor Version Compatibility"), but
    for PTX, which only a driver of the same minor version or a newer one compiles. A base that requires the same
    major version or a newer one is kept: it lists the older drivers that its forward compatibility package serves.
    """
    major = cuda.split(".", maxsplit=1)[0]
    stated = _LEAST_CUDA.match(base)
    if stated is not None and int(stated[1]) >= int(major):
        return base
    return f"cuda>={cuda if target.ptx else f'{major}.0'}"


def _arch(target: Target) -> str:
    """The compute capabilities that the compiled packages run on."""
    alternatives = []
    for sm in target.sm:
        # A cubin runs on its own major version alone, from its minor version on (CUDA programming guide, "Binary
        # Compatibility").
        first, last = first_and_last(sm)
        alternatives.append(f"arch>={first},arch<{last}")
    if target.ptx:
        # PTX is compiled by the driver for every later GPU.
        newest = Architectures.for_target(target).ptx[0]
        alternatives.append(f"arch>={first_and_last(newest)[0]}")
    return " ".join(alternatives)
