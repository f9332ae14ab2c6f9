"""A certificate says what was measured about which image, and that it is not signed."""

import hashlib
import json
from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Device
from envbuild.certify.cases import expand
from envbuild.certify.certificate import PREDICATE_TYPE, STATEMENT_TYPE, make_certificate, read_certificate
from envbuild.certify.ground import Ground
from envbuild.certify.judge import CaseResult, Results, Step, judge
from envbuild.certify.plan import Subject

MATRIX = Catalog.open(Path("/nonexistent")).matrix("certify-quick")
CASES = expand(MATRIX, "certify-quick", Ground(device=Device.CPU))


def test_certificate_is_a_statement_with_the_numbers_and_no_signature(tmp_path):
    steps = tuple(Step(step=number, loss=6.0, grad_norm=1.5, seconds=0.1) for number in range(1, 6))
    results = Results(
        environment={"python": "3.11.2"},
        environment_findings=(),
        smoke_version="1",
        started_at="2026-01-01T00:00:00Z",
        finished_at="2026-01-01T00:01:00Z",
        cases={
            case.id: CaseResult(case=case.id, status="completed", steps=steps, seconds=1.0, failure=None)
            for case in CASES
        },
    )
    statement = make_certificate(
        subject=Subject(
            name="mcore-debian12-cpu",
            stack="mcore",
            base="debian12",
            target="cpu",
            lock_digest="sha256:ll",
            oci_digest="sha256:oo",
            sqsh_digest="sha256:ss",
        ),
        key="sha256:key",
        lock_is_current=True,
        matrix_name="certify-quick",
        matrix=MATRIX,
        whole_matrix=True,
        plan_digest="sha256:plan",
        smoke_digest="sha256:smoke",
        runtime="mount",
        results=results,
        verdicts=judge(CASES, MATRIX, results),
    )
    assert json.loads(json.dumps(statement, allow_nan=False)) == statement
    assert statement["_type"] == STATEMENT_TYPE
    assert statement["predicateType"] == PREDICATE_TYPE
    assert statement["subject"] == [
        {"name": "mcore-debian12-cpu.oci", "digest": {"sha256": "oo"}},
        {"name": "mcore-debian12-cpu.sqsh", "digest": {"sha256": "ss"}},
    ]
    predicate = statement["predicate"]
    assert predicate["signed"] is False
    assert "not signed" in predicate["note"]
    assert predicate["tolerance"] == {"fp32": {"loss_relative": 1e-5, "grad_norm_relative": 1e-4}}
    assert [case["id"] for case in predicate["cases"]] == [case.id for case in CASES]
    baseline, dp2 = predicate["cases"][:2]
    assert baseline["baseline"] is None
    assert baseline["largest_relative_difference"] == {"loss": None, "grad_norm": None}
    assert dp2["baseline"] == "gpt-fp32-baseline"
    assert dp2["largest_relative_difference"] == {"loss": 0.0, "grad_norm": 0.0}
    assert dp2["steps"][0] == {"step": 1, "loss": 6.0, "grad_norm": 1.5}
    # The seal as the docs describe it.
    seal = predicate.pop("seal")
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert seal == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    predicate["seal"] = seal
    (tmp_path / "certificate.json").write_text(json.dumps(statement))
    read = read_certificate(tmp_path / "certificate.json")
    assert json.loads(read.model_dump_json(by_alias=True)) == statement
