"""Whether a driver can be imported in a process that is forked into ranks afterwards; needs no GPU."""

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild_smoke import drivers
from envbuild_smoke.environment import imported
from envbuild_smoke.error_line import error_line
from envbuild_smoke.plan.axes import Driver
from envbuild_smoke.plan.models import Device
from envbuild_smoke.run.forkserver import rank_variables


@dataclass(frozen=True, kw_only=True)
class DriverStart:
    """What the import of a driver does.

    `starters` are the lines that start CUDA by torch. `errors` are what was raised, and what that was raised from:
    without a GPU there are some also where an import starts CUDA.
    """

    cuda_started: bool
    starters: list[str]
    errors: list[str]


def start_driver(name: Driver, device: Device) -> DriverStart:
    """Import a driver as the fork server does, and check its start."""
    # Before the libraries, which read them as they are imported.
    os.environ.update(rank_variables(device))
    starters: list[str] = []
    errors: list[str] = []
    try:
        _note_starts_of_cuda(starters)
        module = drivers.module(name)
        if hasattr(module, "check_start"):
            module.check_start()
    except BaseException as error:  # noqa: BLE001 - an import can raise anything
        traceback.print_exc()
        errors = [error_line(each) for each in _with_causes(error)]
    return DriverStart(cuda_started=imported.cuda_state().started, starters=starters, errors=errors)


def _note_starts_of_cuda(starters: list[str]) -> None:
    """Have the line that starts CUDA noted: an import may catch its error, and then nothing else shows it."""
    import torch

    original, own = torch.cuda._lazy_init, str(Path(torch.__file__).parent)

    def noted() -> None:
        call = [each for each in traceback.extract_stack()[:-1] if not each.filename.startswith(own)][-1]
        starters.append(f"{call.filename}:{call.lineno}: {call.line}")
        original()

    torch.cuda._lazy_init = noted


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
