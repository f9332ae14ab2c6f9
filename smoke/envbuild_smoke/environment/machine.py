"""The machine that a run is on, and the image it is in, as the results have them."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild_smoke.environment import gpus
from envbuild_smoke.results import Gpu, Image, Machine

FINGERPRINT = Path("/etc/envbuild/fingerprint.json")
# Variables that change what is loaded, how ranks are connected, or which kernels run. No others: they may be secrets.
_PREFIXES = (
    *("NCCL_", "CUDA_", "CUBLAS_", "GLOO_", "TORCH_NCCL_", "NVTE_", "UCX_", "LD_", "PYTHON"),
    *("ONEDNN_", "ATEN_CPU_"),
)
_CHUNK_BYTES = 1 << 20


def describe(used: Sequence[Gpu], variables: Mapping[str, str], versions: Mapping[str, str | None]) -> Machine:
    """Return the machine; `variables` are what the ranks get in addition to the environment."""
    effective = {**os.environ, **variables}
    return Machine(
        cpu_model=_cpu_model(),
        cpu_count=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(used),
        cuda=versions.get("cuda"),
        nccl=versions.get("nccl"),
        topology=gpus.topology() if used else None,
        variables={name: effective[name] for name in sorted(effective) if name.startswith(_PREFIXES)},
    )


def image(file: Path) -> Image:
    """Return digest and size of the image's file, and the fingerprint of the image that this runs in.

    Raises OSError when the file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Image(file_digest=f"sha256:{digest.hexdigest()}", file_bytes=size, fingerprint=_fingerprint())


def _fingerprint() -> dict[str, object] | None:
    try:
        value = json.loads(FINGERPRINT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _cpu_model() -> str | None:
    # x86 has a "model name"; Arm only numbers of maker and part.
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return None
