"""How a plan is run: on which GPUs, in which processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.results import Gpu, Image

# In the output directory: what compilers of the libraries cache.
CACHES = "caches"

Isolation = Literal["live", "process"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run: on which GPUs (empty on the CPU), with what isolation, resuming an interrupted run or not.

    `image` is what machine.image returned of the file that the image was started from; `program` is what the ranks
    run, None for the plan's drivers. With several `nodes`, node 0 listens at `head`, and all have the `token` in
    `token_file`, of which each start of a launcher has another.
    No case starts that would not end before `ends_at`, in seconds since 1970.
    """

    gpus: tuple[Gpu, ...] = ()
    isolation: Isolation = "live"
    resume: bool = False
    image: Image | None = None
    nodes: int = 1
    node_rank: int = 0
    head: tuple[str, int] = ("127.0.0.1", 0)
    token: bytes = b""
    token_file: Path | None = None
    ends_at: float | None = None
    program: RankProgram | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the ranks: the chosen GPUs, counted in nvidia-smi's order."""
        # UUIDs: CUDA's indices follow its own order unless CUDA_DEVICE_ORDER is set, those of nvidia-smi the bus.
        uuids = ",".join(gpu.uuid for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": uuids} if self.gpus else {}


def cache_variables(out: Path) -> dict[str, str]:
    """Return where Triton and torch's compiler cache what they compile: in this run's output, apart from other runs.

    Triton's default is below the home directory, which is read-only in an image that is mounted so.
    """
    return {
        "TRITON_CACHE_DIR": str(out / CACHES / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / CACHES / "inductor"),
    }
