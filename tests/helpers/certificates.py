"""Certificates of made-up runs: every field filled, numbers that look like training."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from envbuild import __version__
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.statement import Measured, make_certificate, subject_digests
from envbuild.certify.models import CaseVerdict

DIGITS = {"lock": "1", "oci": "2", "sqsh": "3", "plan": "4", "smoke": "5", "key": "6", "matrix": "7"}
SHA = {name: f"sha256:{digit * 64}" for name, digit in DIGITS.items()}
SUBJECT = {
    "stack": "mcore", "base": "ubuntu2404-cu130", "target": "h200", "form": "sqsh", "launcher": "bwrap",
    "lock_digest": SHA["lock"], "oci_digest": SHA["oci"], "sqsh_digest": SHA["sqsh"],
}  # fmt: skip
LAYOUTS = ("dp2", "tp2", "tp2-sp", "pp2", "pp2-vp2", "cp2", "tp2-pp2")
# What GPU and driver a page shows; and a variable whose value has all that HTML minds.
EVIL = "<script>alert(1)</script>&\"'"
TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"


def steps_of(count: int = 8, *, loss: float = 1.0, norm: float = 1.0) -> list[dict[str, Any]]:
    """Numbers that fall as losses do; ``loss`` and ``norm`` multiply them."""
    return [
        {"step": number, "loss": loss * (5 + 2.7 * math.exp(-number / 3)), "grad_norm": norm * (3.4 - number / 9),
         "seconds": 0.14}
        for number in range(1, count + 1)
    ]  # fmt: skip


REFERENCE = {
    "not_compared": "", "tensors": 126,
    "largest_relative_difference": {
        "loss": 3e-8, "grad_norm": 3e-7, "activations": 2.5e-7, "gradients": 6e-7, "weights": 1.6e-6
    },
    "tolerance": {"loss": 1e-6, "grad_norm": 1e-4, "activations": 1e-5, "gradients": 1e-5, "weights": 2e-5},
}  # fmt: skip


SPREAD = {
    "runs": 4, "loss": [1e-8, *[3e-8] * 7], "grad_norm": [1e-7, *[2e-7] * 7], "weights": 1e-6, "caught": 1e-6
}  # fmt: skip


def case_of(case_id: str, **changes: Any) -> dict[str, Any]:
    """A case that passed, as the JSON of a verdict."""
    prefix, _, layout = case_id.rpartition("-fp32-") if "-fp32-" in case_id else case_id.rpartition("-bf16-")
    precision = "fp32" if "-fp32-" in case_id else "bf16"
    is_baseline = layout.startswith("baseline")
    none = {"loss": None, "grad_norm": None, "weights": None, "gradients": None}
    off = {"loss": 2.5e-7, "grad_norm": 1.9e-6, "weights": None, "gradients": 3e-7}
    return {
        "id": case_id, "baseline": None if is_baseline else f"{prefix}-{precision}-baseline", "repeat": 1,
        "passed": True, "problems": [], "seconds": 4.2, "devices": [0] if is_baseline else [0, 1], "nodes": [0],
        "largest_relative_difference": none if is_baseline else off,
        "tolerance": none if is_baseline else {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-4, "gradients": 1e-6},
        "steps": steps_of(), "observed": {"attention": "DotProductAttention"},
        "reference": REFERENCE if is_baseline else None, "spread": SPREAD if is_baseline else None, "known_wrong": [],
        **changes,
    }  # fmt: skip


def cases(models: tuple[str, ...] = ("gpt",), precision: str = "fp32") -> list[dict[str, Any]]:
    """A baseline and every layout for each model."""
    return [case_of(f"{model}-{precision}-{layout}") for model in models for layout in ("baseline", *LAYOUTS)]


def machine(gpus: int = 2) -> dict[str, Any]:
    listed = [
        {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H200", "memory": "143771 MiB",
         "driver": "580.82.07", "compute_capability": "9.0"}
        for index in range(gpus)
    ]  # fmt: skip
    return {
        "cpu_model": "Intel(R) Xeon(R) Platinum 8480C", "cpu_count": 32, "memory_bytes": 274877906944, "gpus": listed,
        "cuda": "13.0", "nccl": "2.27.7", "topology": TOPOLOGY, "variables": {"NCCL_DEBUG": "INFO", "NCCL_X": EVIL},
    }  # fmt: skip


def bandwidth() -> dict[str, Any]:
    points = [
        {"bytes": size, "seconds": size / speed / 1e9, "algorithm_gigabytes_per_second": speed,
         "bus_gigabytes_per_second": speed}
        for size, speed in ((1 << 16, 3.1), (1 << 20, 41.0), (1 << 24, 187.0), (1 << 26, 268.0), (1 << 30, 331.0),
                            (1 << 32, 349.0))
    ]  # fmt: skip
    return {
        "sweep": "node", "nodes": [0], "all_to_all": [], "failure": None,
        "ranks": 2, "backend": "nccl", "transports": ["P2P/CUMEM"], "points": points,
        "all_gather": points[:1],
        "floor_gigabytes_per_second": 300.0,
    }  # fmt: skip


def swept(nodes: list[int], speed: float, **changes: Any) -> dict[str, Any]:
    """A sweep between nodes that reached so many GB/s."""
    points = [{"bytes": 1 << 30, "seconds": 0.1, "algorithm_gigabytes_per_second": speed,
               "bus_gigabytes_per_second": speed}]  # fmt: skip
    return {
        "sweep": "pair" if len(nodes) == 2 else "ramp", "nodes": nodes, "ranks": 8 * len(nodes), "backend": "nccl",
        "transports": ["NET/IB", "P2P/CUMEM"], "points": points, "all_gather": points, "all_to_all": points, **changes,
    }  # fmt: skip


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "smoke": {"version": "0.1.0", "digest": SHA["smoke"]},
        "environment": {"python": "3.12.3", "versions": {"torch": "2.11.0", "megatron-core": "0.16.1"}},
        "machine": machine(), "nodes": [], "bandwidth": bandwidth(), "network": [],
        "isolation": "live", "devices": [0, 1],
        "image": {"file_digest": SHA["sqsh"], "file_bytes": 4096, "fingerprint": None},
        "gpu_states_before": [{"index": "0", "temperature_celsius": "31", "throttle_reasons": "0x1"}],
        "gpu_states_after": [],
        "started_at": "2026-03-01T10:00:00Z", "finished_at": "2026-03-01T10:04:00Z", **changes,
    }  # fmt: skip


def statement(*, subject: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """The sealed statement of a certificate; ``changes`` are fields of its predicate."""
    about = SUBJECT | (subject or {})
    digests = subject_digests("mcore-ubuntu2404-cu130-h200", about)
    predicate: dict[str, Any] = {
        **{name: about[name] for name in ("stack", "base", "target", "form", "launcher", "lock_digest")},
        "key": SHA["key"], "verdict": "passed", "lock_is_current": True, "matrix": "certify-full",
        "tolerance": {"fp32": {"loss_relative": 1e-5}}, "matrix_digest": SHA["matrix"], "matrix_is_shipped": True,
        "whole_matrix": True, "plan_digest": SHA["plan"], "nonce": "ab" * 16, "judge": 2, "envbuild": __version__,
        "runtime": "loop", "measured": measured(), "cases": cases(), "issued_at": now(), **changes,
    }  # fmt: skip
    predicate["measured"] = Measured.model_validate(predicate["measured"]).model_dump(mode="json", by_alias=True)
    predicate["cases"] = [
        CaseVerdict.model_validate(case).model_dump(mode="json", by_alias=True) for case in predicate["cases"]
    ]
    return make_certificate(digests, predicate)


def now() -> str:
    return datetime.now(timezone.utc).strftime(MOMENT_FORMAT)
