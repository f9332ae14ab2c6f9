"""A calibration proposes bands with their evidence, within what a matrix may have, and changes nothing."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.processes import wait_until
from unit.certify.plans import CASES

from envbuild.catalog.matrix import Tolerance
from envbuild.certify.calibrate import band_of, bound_of, calibrate, propose, spreads_of
from envbuild.certify.certify import CertifyOptions
from envbuild.certify.models import CaseVerdict, Numbers, Problem
from envbuild.core import locks, tomlread
from envbuild.core.errors import CertificationFailedError

TP2, DP2, PP2, BOTH = (f"gpt-fp32-{name}" for name in ("tp2", "dp2", "pp2", "tp2-pp2"))


@pytest.mark.parametrize(
    ("precision", "spread", "band"),
    [
        ("fp32", 0.0, 1e-6),
        ("fp32", 2e-8, 1e-6),
        ("fp32", 3e-6, 3e-5),
        ("fp32", 3.01e-6, 4e-5),
        ("fp32", 9.9e-6, 1e-4),
        ("bf16", 1e-6, 1e-4),
        ("bf16", 1e-3, 1e-2),
        ("fp8", 0.0, 1e-3),
        ("fp32", math.inf, math.inf),
    ],
)
def test_band_is_ten_times_the_spread_and_not_below_rounding(precision, spread, band):
    assert band_of(precision, spread) == band


def numbers(loss, norm=1e-6):
    return {"loss_relative": loss, "grad_norm_relative": norm}


def test_axes_have_the_bands_of_the_cases_that_use_them_alone():
    bands, refused = propose(CASES, {TP2: numbers(2e-6), DP2: numbers(0.0), PP2: numbers(1e-6)})
    assert refused == []
    assert {place: band["loss_relative"] for place, band in bands.items()} == {
        "fp32": 2e-5,
        "fp32.tensor": 2e-5,
        "fp32.data": 1e-6,
        "fp32.pipeline": 1e-5,
    }


def test_case_of_several_axes_fits_into_the_widest_of_their_bands():
    bands, _ = propose(CASES, {TP2: numbers(2e-6), PP2: numbers(1e-6), BOTH: numbers(5e-6)})
    assert bands["fp32.tensor"]["loss_relative"] == 5e-5
    assert bands["fp32.pipeline"]["loss_relative"] == 1e-5
    table = {**bands["fp32"], "weights_relative": 0.0, "tensor": bands["fp32.tensor"]}
    case = next(case for case in CASES if case.id == BOTH)
    assert Tolerance.model_validate(table).of(case.axes).loss_relative == 5e-5


def test_nothing_is_proposed_beyond_what_a_matrix_may_have():
    bands, refused = propose(CASES, {TP2: numbers(2e-3, 1e-6), DP2: numbers(1e-7)})
    assert "loss_relative" not in bands["fp32"]
    assert "loss_relative" not in bands["fp32.tensor"]
    assert bands["fp32.tensor"]["grad_norm_relative"] == 1e-5
    assert bands["fp32.data"]["loss_relative"] == 1e-6
    assert [text.split(" would")[0] for text in refused] == ["fp32: loss_relative", "fp32.tensor: loss_relative"]
    assert all("0.02, above the widest that a matrix may have, 0.01" in text for text in refused)


def test_difference_that_is_not_finite_is_proposed_by_nothing():
    """The judge has no number for it, and a problem."""
    verdict = CaseVerdict(
        id=TP2,
        baseline="gpt-fp32-baseline",
        passed=False,
        problems=(Problem(check="parity-weights", text="off by nan"),),
        largest_relative_difference=Numbers(loss=1e-7, grad_norm=0.0),
        seconds=1.0,
        steps=(),
    )
    spreads = spreads_of([verdict])
    assert spreads[TP2] == {"loss_relative": 1e-7, "grad_norm_relative": 0.0, "weights_relative": math.inf}
    bands, refused = propose(CASES, spreads)
    assert "weights_relative" not in bands["fp32.tensor"]
    assert "fp32: weights_relative would be inf" in refused[0]


def test_bounds_are_the_schemas():
    assert (bound_of("loss_relative"), bound_of("grad_norm_relative")) == (0.01, 0.02)


def test_calibration_writes_a_proposal_and_no_certificate(world):
    world.faults = {"scale": {TP2: 1 + 3e-5, PP2: 1 + 1.5e-7}}
    before = (world.project / "envs").exists()
    found = calibrate(world.request(repeats=3, only=()), world.context, CertifyOptions())
    assert world.calls[0]["plan"]["repeats"] == 3
    assert found.bands["fp32.tensor"]["loss_relative"] == 3e-4
    assert found.spreads[TP2]["loss_relative"] == pytest.approx(3e-5)
    text = found.proposal.read_text()
    read = tomlread.loads(text)["tolerance"]["fp32"]
    assert read["tensor"]["loss_relative"] == 3e-4
    assert Tolerance.model_validate(read).pipeline.loss_relative == 2e-6
    for expected in (f"#   {TP2}: loss 3.0e-05", "# 3 repeats", world.lock.lock.digest, "band = 10 x the largest"):
        assert expected in text
    assert world.certificates() == []
    assert (world.project / "envs").exists() is before


def test_calibrations_of_the_same_wait_for_each_other(world):
    """They share a folder: the second would take the first's results, and its container, for left-overs."""
    request = world.request(repeats=2, only=(TP2,))
    done = calibrate(request, world.context, CertifyOptions())
    lock = done.proposal.parent.with_name(f".{done.proposal.parent.name}.lock")
    with ThreadPoolExecutor() as pool:
        with locks.exclusive(lock):
            second = pool.submit(calibrate, request, world.context, CertifyOptions())
            wait_until(lambda: any("waiting for it" in note for note in world.reporter.notes))
            assert len(world.calls) == 1
        assert second.result(timeout=300).bands == done.bands


def test_calibration_of_training_that_is_wrong_in_another_way_is_refused(world):
    world.faults = {"scale": {TP2: math.nan}}
    with pytest.raises(CertificationFailedError) as caught:
        calibrate(world.request(repeats=2), world.context, CertifyOptions())
    assert f"{TP2}: not-finite: " in caught.value.why
    assert not list((world.project / "out").rglob("tolerance.toml"))
