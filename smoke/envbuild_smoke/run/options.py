"""How a plan is run: on which GPUs, in which processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envbuild_smoke.environment.gpus import Gpu

# In the output directory: what compilers of the libraries cache.
CACHES = "caches"

Isolation = Literal["live", "process"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run: on which GPUs (empty on the CPU), with what isolation, going on with results or not.

    `image` is what machine.image returned of the file that the image was started from.
    """

    gpus: tuple[Gpu, ...] = ()
    isolation: Isolation = "live"
    resume: bool = False
    image: Mapping[str, Any] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks get in their environment: nvidia-smi's order, so that torch counts GPUs as it does."""
        uuids = ",".join(gpu.uuid for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": uuids} if self.gpus else {}


def cache_variables(out: Path) -> dict[str, str]:
    """Where Triton and torch's compiler keep what they make for GPUs: with this run, and nothing of another.

    Triton's own place is below the home, which in an image that is mounted read-only cannot be written.
    """
    return {
        "TRITON_CACHE_DIR": str(out / CACHES / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / CACHES / "inductor"),
    }
