from __future__ import annotations

import pytest

from envbuild.core.errors import (
    ERROR_CLASSES,
    BuildError,
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    CheckRefusedError,
    EnvbuildError,
    FailedRun,
    InternalError,
    MachineError,
    NetworkError,
    PublicationRefusedError,
    ResolutionError,
    ResultsRefusedError,
)
from envbuild.ledger.models import Fault
from envbuild.nightly.faults import counts, fault_of, step_error, waits_for_hardware


def failed(*problems: tuple[str, str]) -> CertificationFailedError:
    cases = [{"passed": False, "problems": [{"check": check, "text": text}]} for check, text in problems]
    return CertificationFailedError("failed", run=FailedRun(cases=[{"passed": True, "problems": []}, *cases]))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (NetworkError("registry"), "infrastructure"),
        (MachineError("disk"), "infrastructure"),
        (ResultsRefusedError("truncated"), "infrastructure"),
        (InternalError("bug"), "infrastructure"),
        (CertificationCannotRunError("gpus", reason="gpus-in-use"), "infrastructure"),
        (CertificationCannotRunError("stack", reason="image-lacks-stack"), "build"),
        (BuildError("wheel", why="nvcc fatal"), "build"),
        (BuildError("wheel", why="cc1plus: No space left on device"), "infrastructure"),
        (ResolutionError("no"), "build"),
        (CheckRefusedError("drift"), "check"),
        (PublicationRefusedError("too old"), "check"),
        (CertificateRefusedError("edited"), "check"),
        (failed(("parity-loss", "1e-2 instead of 1e-6")), "training"),
        (failed(("rank-exception", "AssertionError: shapes differ")), "training"),
        (failed(("rank-exception", "CUDA error: uncorrectable ECC error encountered")), "infrastructure"),
        (failed(("rank-exit", "rank 3 ended"), ("rank-exception", "NVML: GPU is lost")), "infrastructure"),
        # A lost GPU explains no wrong number.
        (failed(("parity-loss", "1e-2"), ("rank-exception", "GPU is lost")), "training"),
        (failed(("timeout", "no step for 600 s")), "training"),
        (failed(("hardware", "GPU 1 had 3 uncorrectable ECC errors while the cases ran")), "infrastructure"),
        (failed(("bandwidth", "reaches 12 GB/s"), ("bad-node", "node 3 fails with 1 and 2")), "infrastructure"),
        (failed(("parity-loss", "step 1"), ("bad-node", "node 3 fails with 1 and 2")), "training"),
        (failed(("transport", "ranks communicated by NET/Socket")), "training"),
    ],
)
def test_whose_fault_it_is(error: EnvbuildError, fault: Fault) -> None:
    assert fault_of(error) == fault
    assert step_error(error).fault == fault
    assert counts(fault) is (fault != "infrastructure")


def test_every_class_of_error_is_somebodys_fault() -> None:
    assert all(fault_of(kind("x")) for kind in ERROR_CLASSES if kind.__name__ != "InterruptedByUserError")


def test_only_missing_hardware_is_waited_for() -> None:
    assert waits_for_hardware(CertificationCannotRunError("none", reason="no-driver"))
    assert not waits_for_hardware(CertificationCannotRunError("none", reason="no-runtime"))
    assert not waits_for_hardware(MachineError("none", reason="no-driver"))
