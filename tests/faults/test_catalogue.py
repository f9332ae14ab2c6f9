"""The catalogue itself: every check has a fault, and each entry is tested."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from faults import corruptions
from faults.catalogue import FAULTS
from faults.gpus import GPU_FAULTS, MATRIX
from faults.harness import Harness  # noqa: F401 - the harness imports all that faults need
from faults.kinds import Corruption, Edit, Scenario, Switch
from faults.matrices import matrix_of

from envbuild.catalog.catalog import Catalog
from envbuild.certify.models import CHECKS
from envbuild.core import errors

HERE = Path(__file__).parent


def test_ids_are_unique_and_name_directories() -> None:
    assert len(FAULTS) >= 50
    assert [name for name, count in Counter(fault.id for fault in FAULTS).items() if count > 1] == []
    assert all(re.fullmatch(r"[a-z0-9-]{1,60}", fault.id) for fault in FAULTS)


def test_checks_are_codes_of_the_judge_or_errors() -> None:
    assert [fault.id for fault in FAULTS if fault.check not in CHECKS and not hasattr(errors, fault.check)] == []


# No test here trains with Megatron-Bridge, or has a GPU whose memory errs: tests/unit/certify/test_judge.py and
# test_run_problems.py have what they find.
WITHOUT_FAULT = {"hugging-face", "hardware"}


def test_every_check_has_a_fault_that_it_must_find() -> None:
    assert set(CHECKS) - {fault.check for fault in FAULTS} == WITHOUT_FAULT


def test_faults_for_gpus_have_plants_checks_and_a_matrix(tmp_path: Path) -> None:
    switch = (HERE / "switch" / "envbuild_fault.py").read_text()
    for fault in GPU_FAULTS:
        assert fault.check in CHECKS
        assert f'"{fault.id}"' in switch
    (tmp_path / "envs" / "matrices").mkdir(parents=True)
    (tmp_path / "envs" / "matrices" / "gpus.toml").write_text(matrix_of(GPU_FAULTS, MATRIX))
    matrix = Catalog.open(tmp_path).matrix("gpus")
    # A model of its own for each, and its baseline.
    assert (len(matrix.models), len(matrix.cases)) == (len(GPU_FAULTS), 2 * len(GPU_FAULTS))


def test_about_a_quarter_is_quick_and_of_every_place() -> None:
    quick = [fault for fault in FAULTS if fault.quick]
    assert 0.2 <= len(quick) / len(FAULTS) <= 0.45
    assert {fault.where for fault in FAULTS} - {fault.where for fault in quick} <= {"file", "network"}


def test_plants_exist() -> None:
    switch = (HERE / "switch" / "envbuild_fault.py").read_text()
    for fault in FAULTS:
        if isinstance(fault.plant, Switch):
            assert f'"{fault.plant.name}"' in switch, fault.id
        if isinstance(fault.plant, Corruption):
            assert callable(getattr(corruptions, fault.plant.name)), fault.id
        if isinstance(fault.plant, Edit):
            assert fault.plant.changes, fault.id


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if isinstance(fault.plant, Scenario)], ids=lambda f: f.id)
def test_fault_between_plan_and_judge_has_a_test_of_its_own(fault) -> None:
    assert f'fault_named("{fault.id}")' in (HERE / "test_runs.py").read_text()
