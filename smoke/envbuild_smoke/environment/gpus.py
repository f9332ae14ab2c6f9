"""The GPUs of this machine, those that the run may use, and whether they are of the plan's generation.

Read from nvidia-smi and not from torch: the runner would have to import it, and CUDA would hold memory on
every GPU.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from envbuild_smoke.plan.models import WantedGpu
from envbuild_smoke.results import Gpu

Reason = Literal["too-few-gpus", "gpus-in-use", "wrong-gpu", "no-driver"]
_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version", "compute_cap")
# What may explain a slow or a wrong step. Drivers before 535 call the last one clocks_throttle_reasons.active.
_STATE = {
    "index": "index",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "temperature_celsius": "temperature.gpu",
    "power": "power.draw",
    "used_memory": "memory.used",
    "uncorrected_ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "throttle_reasons": "clocks_event_reasons.active",
}
DEVICES = Path("/dev")
# Of a GPU's memory, more than the driver, a monitor or a desktop take. A training takes most of it.
_IDLE_SHARE = 0.1
# A driver that hangs lets nvidia-smi wait in the kernel, without an end.
_LIMIT_SECONDS = 60


class CannotRunError(Exception):
    """The GPUs do not meet the plan; `reason` is for programs."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnknownGpuError(Exception):
    """`--gpus` names an unknown GPU."""


def select(wanted: WantedGpu, count: int, requested: Sequence[str]) -> tuple[Gpu, ...]:
    """Return the GPUs to use: those named, else those that CUDA_VISIBLE_DEVICES leaves, else all.

    Raises UnknownGpuError for an unknown name, and CannotRunError when fewer than `count` are left,
    when they are not of the generation that the plan wants, or when other processes use them.
    """
    present = installed()
    chosen = _named(present, requested, "--gpus") if requested else _visible(present)
    if len(chosen) < count:
        names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in chosen) or "none"
        raise CannotRunError(
            "too-few-gpus",
            f"the largest case or the bandwidth sweep needs {count} GPUs; available: {names}. Run on a machine with "
            f"{count}, name more with --gpus, or leave large cases out (--max-gpus of envbuild certify)",
        )
    _demand_generation(chosen, wanted)
    _demand_unused(chosen)
    return chosen


def installed() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; raises CannotRunError when nvidia-smi does not list them."""
    rows = _query("--query-gpu=" + ",".join(_FIELDS))
    gpus = []
    for row in rows:
        # A line such as "No devices were found" can come with exit status 0.
        if len(row) != len(_FIELDS) or not row[0].isdigit():
            raise CannotRunError("no-driver", f"nvidia-smi printed {', '.join(row)!r} where a GPU was expected")
        index, *values = row
        gpus.append(Gpu(int(index), *values))
    return tuple(gpus)


def states(used: Sequence[Gpu]) -> list[dict[str, str]]:
    """Return clocks, temperature, memory in use, ECC errors and throttling of GPUs, as nvidia-smi prints them.

    Empty where it does not answer: nothing is decided by them.
    """
    if not used:
        return []
    for fields in (_STATE, {**_STATE, "throttle_reasons": "clocks_throttle_reasons.active"}):
        try:
            rows = _query("--query-gpu=" + ",".join(fields.values()))
        except CannotRunError:
            continue
        table = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
        return [state for state in table if state["index"] in {str(gpu.index) for gpu in used}]
    return []


def topology() -> str | None:
    """Return what `nvidia-smi topo -m` prints, or None."""
    try:
        answer = _nvidia_smi("topo", "-m")
    except (OSError, subprocess.SubprocessError):
        return None
    # It underlines its headings for terminals.
    return re.sub(r"\x1b\[[0-9;]*m", "", answer.stdout).strip() if answer.returncode == 0 else None


def _nvidia_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )


def _query(question: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; raises CannotRunError with the reason when it fails."""
    # The container toolkit mounts nvidia-smi only with the capability "utility": CUDA works without it.
    if shutil.which("nvidia-smi") is None:
        if any(DEVICES.glob("nvidia[0-9]*")):
            message = (
                "this machine has GPUs (/dev/nvidia*) but no nvidia-smi, so they cannot be identified. In a container, "
                "ask for the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
        else:
            message = (
                "neither nvidia-smi nor /dev/nvidia0 exists: no NVIDIA driver, or a container that was "
                "started without its GPUs"
            )
        raise CannotRunError("no-driver", message)
    try:
        answer = _nvidia_smi(question, "--format=csv,noheader")
    except subprocess.TimeoutExpired:
        raise CannotRunError(
            "no-driver", f"nvidia-smi did not answer within {_LIMIT_SECONDS} s: the driver hangs; see the kernel's log"
        ) from None
    except OSError as error:
        raise CannotRunError("no-driver", f"nvidia-smi cannot be started: {error.strerror or error}") from None
    if answer.returncode != 0:
        words = " ".join((answer.stdout + answer.stderr).split())
        raise CannotRunError("no-driver", f"nvidia-smi failed with status {answer.returncode}: {words}")
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def _visible(present: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    # A scheduler assigns GPUs to this job through it; nvidia-smi lists the others all the same.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return _named(present, [name for name in visible.split(",") if name], "CUDA_VISIBLE_DEVICES")


def _named(present: tuple[Gpu, ...], names: Sequence[str], source: str) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for name in names:
        # As CUDA does, the beginning of a UUID is enough where one GPU alone has it.
        is_uuid = name.startswith("GPU-")
        matching = [gpu for gpu in present if name == str(gpu.index) or (is_uuid and gpu.uuid.startswith(name))]
        if len(matching) != 1:
            known = ", ".join(f"{gpu.index} = {gpu.uuid}" for gpu in present) or "none"
            raise UnknownGpuError(f"{source} names {name!r}; the GPUs here are: {known}")
        if matching[0] in chosen:
            raise UnknownGpuError(f"{source} names GPU {matching[0].index} twice")
        chosen.append(matching[0])
    # By index, as CUDA_DEVICE_ORDER=PCI_BUS_ID counts them: neighbours on the bus stay neighbours.
    return tuple(sorted(chosen, key=lambda gpu: gpu.index))


def _demand_generation(chosen: Sequence[Gpu], wanted: WantedGpu) -> None:
    capabilities = {capability(sm) for sm in wanted.sm}
    for gpu in chosen:
        if gpu.compute_capability not in capabilities:
            raise CannotRunError(
                "wrong-gpu",
                f"GPU {gpu.index} is a {gpu.name} of compute capability {gpu.compute_capability}; the plan's target "
                f"wants {' or '.join(sorted(capabilities))}. Run on such a machine, choose others with --gpus, or make "
                "the plan for this target",
            )


# A process on a GPU takes memory and time: a case would fail or be slow for no fault of the environment.
def _demand_unused(chosen: Sequence[Gpu]) -> None:
    by_uuid = {gpu.uuid: gpu for gpu in chosen}
    rows = _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    used = [row for row in rows if row[0] in by_uuid]
    if used:
        described = "; ".join(f"GPU {by_uuid[row[0]].index}: process {', '.join(row[1:])}" for row in used)
        raise CannotRunError(
            "gpus-in-use",
            f"other processes use the GPUs ({described}): end them, wait for them, or choose others with --gpus",
        )
    # Processes outside of a container's PID namespace are not listed; their memory counts all the same.
    totals = {str(gpu.index): gpu.memory for gpu in chosen}
    full = [
        f"GPU {state['index']}: {state['used_memory']} of {totals[state['index']]}"
        for state in states(chosen)
        if _mib(state["used_memory"]) > _IDLE_SHARE * _mib(totals[state["index"]])
    ]
    if full:
        raise CannotRunError(
            "gpus-in-use",
            f"memory of the GPUs is in use ({'; '.join(full)}), by processes that nvidia-smi does not list here: end "
            "them, wait for them, or choose others with --gpus",
        )


def _mib(text: str) -> int:
    """Return the number in "81559 MiB"; 0 where the driver has none."""
    number = text.removesuffix(" MiB")
    return int(number) if number.isdecimal() else 0


def capability(sm: str) -> str:
    """Return "9.0" for the SM "90" or "90a", as nvidia-smi writes it."""
    # The suffix (a: this architecture alone, f: its family) is of compiled code; a GPU has none.
    digits = re.sub(r"[a-z]+$", "", sm)
    return f"{digits[:-1]}.{digits[-1]}"
