"""What the fork server imported: files, versions, devices, and which modules cannot be imported."""

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from envbuild_smoke.environment.foreign_modules import STARTUP_MODULES, new_files
from envbuild_smoke.environment.inventory import MODULES, ImportedModule
from envbuild_smoke.environment.libraries import mapped
from envbuild_smoke.error_line import error_line
from envbuild_smoke.plan.json_reader import read_object

# cuda.h
_CUDA_ERROR_NOT_INITIALIZED = 3


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What the fork server reports of what it imported; the defaults are those of one that could not.

    `cuda_error` is why torch cannot use CUDA. `missing` are modules that cannot be imported, each with the reason.
    `imported` and `started` are files by module, `started` those that Python runs as it starts.
    """

    cuda_devices: int = 0
    cuda_error: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    modules: Mapping[str, ImportedModule] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    imported: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    started: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CudaState:
    """Whether CUDA was `started` in this process, and what torch tells of `devices`, `cuda` and `nccl`.

    `error` is why torch cannot use CUDA, else None.
    """

    started: bool = False
    devices: int = 0
    cuda: str | None = None
    nccl: str | None = None
    error: str | None = None


def describe(modules: Sequence[str]) -> Ready:
    """Return what the runner records; `modules` are imported as well, in a process of their own.

    Raises RuntimeError when an import has started CUDA in this process.
    """
    cuda = cuda_state()
    if cuda.started:
        raise RuntimeError("CUDA was started while the libraries were imported; ranks cannot be forked from here")
    files = new_files()
    absent, more = missing(modules)
    return Ready(
        cuda_devices=cuda.devices,
        cuda_error=cuda.error,
        versions={"cuda": cuda.cuda, "nccl": cuda.nccl},
        modules={name: _module(sys.modules[name]) for name in MODULES if name in sys.modules},
        missing=absent,
        imported={**more, **files},
        libraries=mapped(),
        started={name: getattr(sys.modules[name], "__file__", None) for name in STARTUP_MODULES if name in sys.modules},
    )


def cuda_state() -> CudaState:
    """Return the state of CUDA in this process."""
    torch = sys.modules.get("torch")
    if torch is None:
        return CudaState()
    # Counting may start CUDA, which does not survive a fork: so it is done in a fork, as ranks will use it.
    lines = _in_a_fork(lambda: [asdict(_cuda(torch))])
    return read_object(CudaState, lines[0], "cuda") if lines else CudaState(started=True)


def missing(modules: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the modules that cannot be imported, each with the reason, and the files of what came in with the others.

    Whatever an import does, it does apart.
    """
    problems: dict[str, str] = {}
    files: dict[str, str] = {}
    left = list(modules)
    while left:
        answers = _in_a_fork(partial(map, _try_import, list(left)))
        problems.update({answer["module"]: answer["error"] for answer in answers if answer["error"]})
        for answer in answers:
            files.update(answer["files"])
        left = left[len(answers) :]
        if left:
            # No answer for this one: the process died of it.
            problems[left.pop(0)] = "the process died while it imported it; see forkserver.log"
    return problems, files


def _try_import(name: str) -> dict[str, object]:
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - an import can raise anything
        return {"module": name, "error": error_line(error), "files": new_files()}
    return {"module": name, "error": None, "files": new_files()}


def _module(module: Any) -> ImportedModule:
    return ImportedModule(file=getattr(module, "__file__", None), version=getattr(module, "__version__", None))


def _cuda(torch: Any) -> CudaState:
    started = torch.cuda._is_in_bad_fork() or _driver_was_started()
    nccl = None
    # A torch without NCCL, for the CPU, has no such function.
    with suppress(Exception):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    devices, error = 0, None
    if not started:
        try:
            # Counting alone asks NVML, which also counts where the driver is too old for this torch.
            torch.cuda.init()
            devices = torch.cuda.device_count()
        except Exception as problem:  # noqa: BLE001 - a torch for the CPU asserts, others raise what CUDA says
            error = error_line(problem)
    return CudaState(started=started, devices=devices, cuda=torch.version.cuda, nccl=nccl, error=error)


def _driver_was_started() -> bool:
    """Whether the parent of this fork has started the driver, by whatever library: torch knows only of itself.

    Then every call of the driver is refused in a fork, for good.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    status: int = driver.cuInit(0)
    return status == _CUDA_ERROR_NOT_INITIALIZED


def _in_a_fork(work: Callable[[], Any]) -> list[Any]:
    """Return what `work` yields in a fork of this process, as JSON; less, when that dies."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException), os.fdopen(write, "w", encoding="utf-8") as file:
            os.close(read)
            # Each answer is flushed: those before a module that kills the process count.
            for answer in work():
                file.write(json.dumps(answer) + "\n")
                file.flush()
        # Not sys.exit: the exit handlers are of the process that forked.
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    os.waitpid(pid, 0)
    return answers
