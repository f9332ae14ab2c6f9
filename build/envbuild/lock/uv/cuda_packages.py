"""Which packages of a resolution are for which CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterable

from envbuild.lock.uv_lock import ResolvedPackage

# transformer-engine-cu13, tensorrt-cu12-libs, thing-cu126, cupy-cuda12x.
_CUDA_SUFFIX = re.compile(r"-cu(?:da)?(\d\d)[\dx]?(?=-|$)")
# Packages of NVIDIA's whose version is that of their CUDA.
_CUDA_VERSIONED = frozenset(
    [
        "cuda-toolkit",
        "nvidia-cublas",
        "nvidia-cuda-cupti",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
    ]
)
# NVIDIA's CUTLASS DSL, read in its wheels (4.6.0, 4.8.1): its libraries for CUDA 12 and 13 lie side by side, in
# nvidia_cutlass_dsl/cu12 and /cu13, without a file in common. They need no CUDA library, and on import the newest that
# the driver runs is loaded, and no other. Before 4.6 only the base package was for 12 (envs/knowledge/packages.toml has
# the rest).
_SIDE_BY_SIDE = re.compile(r"^nvidia-cutlass-dsl-libs-cu1[23]$")


def cuda_packages(packages: Iterable[ResolvedPackage]) -> dict[str, list[str]]:
    """The names of packages for a CUDA, by its major version."""
    # By names: the wheels of one CUDA do not exclude those of another in their metadata, and uv takes both.
    by_major: dict[str, list[str]] = {}
    for package in packages:
        name, version = package.name, package.version or "0"
        if _SIDE_BY_SIDE.match(name):
            continue
        if match := _CUDA_SUFFIX.search(name):
            by_major.setdefault(match[1], []).append(name)
        elif name in _CUDA_VERSIONED:
            by_major.setdefault(version.partition(".")[0], []).append(name)
    return by_major
