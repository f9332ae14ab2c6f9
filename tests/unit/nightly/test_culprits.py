"""What a night bisects with."""

from pathlib import Path

import pytest
from helpers.image_inputs import SELECTION
from helpers.ledger_rows import certificate_row, digest, step_row
from helpers.locks import make_lock

from envbuild.catalog.catalog import HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.catalog.stack import Driver
from envbuild.core.errors import UsageError
from envbuild.core.progress import SilentReporter
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import CaseRow, StepError
from envbuild.nightly import culprits
from envbuild.nightly.bisect.bisect import BisectRequest
from envbuild.nightly.models import NightRequest
from envbuild.store.local import LocalStore

BASE = "debian13-cu130"


@pytest.mark.parametrize("driver", [Driver.NEMO, Driver.BRIDGE])
def test_a_case_is_of_the_matrix_of_the_driver_that_the_failed_lock_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    asked: list[BisectRequest] = []

    def stop(request: BisectRequest, *_: object) -> None:
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(culprits, "bisect", stop)
    reporter = SilentReporter()
    context = Context(store=LocalStore(tmp_path / "store", reporter), site=load_site(), reporter=reporter)
    selection = select(SELECTION.catalog, "nemo", "h200", BASE, HostDistribution("debian", "13"))
    request = NightRequest(selections=(selection,), project=tmp_path)
    place = tmp_path / "lockfiles/nemo" / BASE
    of_stack = {"stack": "nemo", "base": BASE, "target": "h200"}
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        search = culprits.CulpritSearch(request=request, ledger=ledger, context=context, budget_seconds=60)
        good = make_lock(place, stack="nemo").digest
        ledger.record(certificate_row(**of_stack, lock_digest=good))
        search.keep_locks([step_row("certify", **of_stack)])
        bad = make_lock(place, "torch==2.13.1+cpu --hash=sha256:cc\n", stack="nemo", driver=driver).digest
        failed = {"run": digest("night"), "case": "a-case", "passed": False, "measured_at": "2026-01-02T03:04:05Z"}
        ledger.record(CaseRow.model_validate(of_stack | failed | {"lock_digest": bad}))
        error = StepError(fault="training", kind="CertificationFailedError", exit_code=8, what="a case failed")
        search.run([step_row("certify", **of_stack, night="n2", state="failed", lock_digest=bad, error=error)])
    assert [bisection.trial.text for bisection in asked] == [f"case a-case of matrix {driver.value}-recipes"]
