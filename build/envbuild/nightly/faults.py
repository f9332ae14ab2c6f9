"""Assign failures: to the infrastructure, a build, the training or a check."""

from __future__ import annotations

import re

from envbuild.core.errors import (
    BuildError,
    CertificationCannotRunError,
    CertificationFailedError,
    ConfigurationError,
    EnvbuildError,
    InternalError,
    MachineError,
    NetworkError,
    PublicationRefusedError,
    ResolutionError,
    ResultsRefusedError,
    UsageError,
)
from envbuild.ledger.models import Fault, StepError
from envbuild.publish.tags import TAG_TAKEN

# What a lost GPU, a full disk or a lost network leaves in the message of a rank: texts of cudaGetErrorString for
# cudaErrorECCUncorrectable, cudaErrorDevicesUnavailable, cudaErrorSystemNotReady and cudaErrorNoDevice ("CUDA Runtime
# API", Error Handling), of nvmlErrorString for NVML_ERROR_GPU_IS_LOST, of the driver's Xid 79, and of errno(3).
_LOST = re.compile(
    r"uncorrectable (ECC|NVLink) error|CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized"
    r"|no CUDA-capable device is detected|GPU is lost|fallen off the bus|No space left on device|Disk quota exceeded"
    r"|Input/output error|Stale file handle|Too many open files"
)
# Checks of a case that a machine can fail; the others are about numbers. `baseline` is of those whose baseline failed.
_OF_A_MACHINE = frozenset(
    {
        *("rank-exception", "rank-signal", "rank-exit", "timeout", "not-reported", "baseline", "hardware"),
        *("nodes", "node-numbers", "node-slow"),
    }
)
# What a bad node of several fails next to that: the others have the same image.
_OF_A_NODE = frozenset({"bad-node", "bandwidth", "transport"})
# Reasons of CertificationCannotRunError that are the image's.
_OF_THE_IMAGE = frozenset({"image-lacks-stack", "no-cases"})
# A plan waits for these; any other reason is a failure.
NO_HARDWARE = frozenset({"no-driver", "too-few-gpus", "wrong-gpu"})


def fault_of(error: EnvbuildError) -> Fault:
    """The fault of an error; ``check`` for classes that are not named here."""
    match error:
        # Results are refused that were cut off on their way; a fault of envbuild's own says nothing about the stack.
        case NetworkError() | MachineError() | ResultsRefusedError() | InternalError():
            return "infrastructure"
        case CertificationCannotRunError():
            return "build" if error.reason in _OF_THE_IMAGE else "infrastructure"
        case CertificationFailedError():
            # A lost GPU explains no wrong number, so one failed comparison is enough for a fault of the training.
            return "infrastructure" if _is_of_a_machine(error) else "training"
        case BuildError() | ResolutionError():
            return "infrastructure" if _LOST.search(error.why) else "build"
        case _:
            return "check"


def counts(fault: Fault) -> bool:
    """Whether a failure says something about the stack, so that it is not tried again until something changed."""
    return fault != "infrastructure"


def is_worth_repeating(error: EnvbuildError) -> bool:
    """Whether another attempt may end otherwise: not where the command line, a file or the image is wrong."""
    if isinstance(error, PublicationRefusedError):
        return error.reason == TAG_TAKEN
    return not isinstance(error, (UsageError, ConfigurationError))


def waits_for_hardware(error: EnvbuildError) -> bool:
    return isinstance(error, CertificationCannotRunError) and error.reason in NO_HARDWARE


def step_error(error: EnvbuildError) -> StepError:
    """An error as the ledger keeps it."""
    return StepError(
        fault=fault_of(error),
        kind=type(error).__name__,
        exit_code=error.exit_code,
        what=error.what,
        why=error.why,
        fix=error.fix,
        reason=error.reason,
    )


def _is_of_a_machine(error: CertificationFailedError) -> bool:
    """Whether every failed case failed by what only a machine does, and one of them says so, or a node is named."""
    if error.run is None:
        return _LOST.search(error.why) is not None
    problems = error.run.all_problems
    checks = {problem.get("check") for problem in problems}
    if "bad-node" in checks:
        return checks <= _OF_A_MACHINE | _OF_A_NODE
    texts = " ".join(str(problem.get("text", "")) for problem in problems)
    return bool(problems) and checks <= _OF_A_MACHINE and _LOST.search(texts) is not None
