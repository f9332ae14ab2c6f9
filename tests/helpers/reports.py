"""Reports of made-up certifications.

One that passed with 64 cases, one with those of the whole matrix on a CPU, one that failed in every way, one of a venv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.certificates import EVIL, SHA, case_of, cases, measured, statement, steps_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.coverage import coverage
from envbuild.certify.cases.expansion import expansion
from envbuild.certify.certificate.statement import Certificate
from envbuild.certify.report.model import Report, report_of

NAME = "mcore-ubuntu2404-cu130-h200"
KEYID = "ab" * 32
MODELS = ("gpt", "gqa", "moe", "mamba-hybrid")
DIFFERS = {"code": "version-mismatch", "package": "torch", "expected": "2.11.0+cu130", "found": "2.10.0"}
LINES = tuple(f"[rank{number % 2}]: a line of a log that is wider than a phone {'x' * number}" for number in range(40))


def large() -> Report:
    """Signed, 64 cases of eight models and precisions."""
    both = [*cases(MODELS), *cases(MODELS, "bf16")]
    for number, case in enumerate(both):
        for step in case["steps"] if case["baseline"] else ():
            step["loss"] *= 1 + number % 7 * 1e-7 * step["step"]
    certificate = Certificate.model_validate(statement(cases=both))
    return report_of(certificate, name=NAME, keyid=KEYID, logs={})


def full() -> Report:
    """Signed, all cases of certify-full of one node on a CPU, each off by a little of its own."""
    matrix = Catalog.open(Path("/nonexistent")).matrix("certify-full")
    made = []
    cases = expansion(matrix, "certify-full", Capabilities(device=Device.CPU)).cases
    for number, case in enumerate(case for case in cases if case.most_nodes == 1):
        if case.is_baseline:
            made.append(case_of(case.id, baseline=None))
            continue
        off = number * 1e-9
        numbers = {"loss": off, "grad_norm": 7.5e-8, "weights": 3.9e-7 if case.compare_weights else None}
        steps = steps_of()
        steps[4]["loss"] *= 1 + off
        made.append(case_of(case.id, baseline=case.baseline_id, largest_relative_difference=numbers, steps=steps))
    certificate = Certificate.model_validate(statement(cases=made))
    return report_of(certificate, name="mcore-debian12-cpu", keyid=KEYID, logs={})


def known_wrong() -> Report:
    """Signed, not whole; all that megatron-core 0.16.1 trains wrongly, and how well certify-full covers each pair."""
    catalog = Catalog.open(Path("/nonexistent"))
    matrix, capabilities = catalog.matrix("certify-full"), Capabilities(device=Device.CPU)
    not_vouched = [
        {"name": name, "versions": "megatron-core 0.16.1", "what": entry.setting(), "why": entry.summary,
         "evidence": entry.evidence, "fix": entry.fix, "fixed_in": entry.fixed_in,
         "cases": [{"id": f"gpt-fp32-tp2-{name}", "result": "failed", "problem": "parity-loss: step 1: 2.0e-02"}]}
        for name, entry in catalog.conflicts.items() if entry.cases
    ]  # fmt: skip
    expanded = expansion(matrix, "certify-full", capabilities).cases
    return report_of(
        Certificate.model_validate(statement(cases=cases(), not_vouched=not_vouched, whole_matrix=False)),
        name=NAME, keyid=None, logs={}, pairs=coverage(matrix, expanded, capabilities),
    )  # fmt: skip


def venv() -> Report:
    """Not signed, a lock in a venv, no GPU, every number the baseline's."""
    kept = measured(machine=None, bandwidth=None, environment={"python": "3.12.3", "cuda_redirects": ["torch.cuda.x"]})
    zero = {"loss": 0.0, "grad_norm": 0.0, "weights": None}
    equal = [case if case["baseline"] is None else {**case, "largest_relative_difference": zero} for case in cases()]
    certificate = Certificate.model_validate(
        statement(
            cases=equal, subject={"form": "none", "launcher": "venv"}, measured=kept, runtime=None, whole_matrix=False
        )
    )
    return report_of(certificate, name=NAME, keyid=None, logs={})


def failed(**changes: Any) -> Report:
    """Two of eight cases failed, and so did the bandwidth and the environment."""
    changed = cases()
    allowed = "off by 1.00e-02 relative, allowed 1e-05"
    changed[5] = case_of(
        "gpt-fp32-pp2-vp2",
        passed=False,
        steps=steps_of(loss=1.01, norm=2.0),
        problems=[{"check": "parity-loss", "text": f"step {number}: loss: {allowed}"} for number in range(1, 9)],
        largest_relative_difference={"loss": 1e-2, "grad_norm": 1.0, "weights": None},
    )
    cut = steps_of()[:3]
    cut[2]["loss"] = None
    changed[6] = case_of(
        "gpt-fp32-cp2",
        passed=False,
        steps=cut,
        problems=[
            {"check": "not-finite", "text": "step 3: loss"},
            {"check": "rank-exception", "text": f"\x1b[31m{EVIL}"},
        ],
        largest_relative_difference={"loss": None, "grad_norm": None, "weights": None},
    )
    fields: dict[str, Any] = {
        "passed": False, "name": NAME, "what": "2 of 8 cases failed", "stack": "mcore", "base": "ubuntu2404-cu130",
        "target": "h200", "form": "sqsh", "launcher": "bwrap",
        "runtime": "loop", "lock_digest": SHA["lock"], "matrix": "certify-full",
        "digests": {f"{NAME}.oci": SHA["oci"], f"{NAME}.sqsh": SHA["sqsh"]}, "whole_matrix": True, "cases": changed,
        "matrix_is_shipped": True,
        "problems": [
            {"check": "bandwidth", "text": "all_reduce moves 12.1 GB/s; the floor is 300"},
            {"check": "environment", "text": "version-mismatch: torch: expected 2.11.0+cu130, found 2.10.0"},
        ],
        "findings": [DIFFERS], "measured": measured(), "plan_digest": SHA["plan"], "nonce": "ab" * 16,
        "envbuild": "0.1.0", "judge": 2, "logs": {"gpt-fp32-cp2": ["logs/gpt-fp32-cp2/rank1.log"]},
        "log": "out/run/smoke.log", "log_end": "\n".join([*LINES, EVIL]), **changes,
    }  # fmt: skip
    return Report.model_validate(fields)


REPORTS = {"large": large, "full": full, "known-wrong": known_wrong, "venv": venv, "failed": failed}
