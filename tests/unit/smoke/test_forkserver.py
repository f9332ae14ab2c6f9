"""The death of the fork server: its cases start once more, and no case fails that its ranks did not fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import case_document
from unit.smoke.conftest import BASELINE, Done, two_ranks
from unit.smoke.processes import assert_gone

from envbuild_smoke.run.forkserver import rank_variables
from envbuild_smoke.run.options import Isolation, Options
from envbuild_smoke.run.pool import Pool

RunFake = Callable[..., Done]


def restarted(done: Done) -> set[str]:
    """The cases that were started a second time for the death of the fork server."""
    return {name for name, case in done.cases.items() if "was killed by SIGKILL" in (case["restarted"] or "")}


def test_case_under_which_it_dies_twice_has_failed(run_fake: RunFake, tmp_path: Path) -> None:
    done = run_fake(BASELINE, two_ranks("parricide-dp2"), two_ranks("train-dp2"))
    case = done.cases["parricide-dp2"]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exit", None)
    assert "the fork server died" in case["failure"]["message"]
    assert done.cases["train-dp2"]["status"] == "completed"
    assert restarted(done) == {"parricide-dp2"}
    assert_gone(tmp_path)


@pytest.mark.parametrize("isolation", ["live", pytest.param("process", marks=pytest.mark.slow)])
def test_all_cases_that_ran_start_once_more(run_fake: RunFake, tmp_path: Path, isolation: Isolation) -> None:
    """Two cases run when it dies, and one waits; all ranks that ran die with it."""
    wide = case_document("train-wide", "train-baseline", data=4)
    running = [two_ranks(f"{what}-dp2") for what in ("unlucky", "neighbour")]
    later = two_ranks("train-later")
    done = run_fake(BASELINE, wide, *running, later, options=Options(isolation=isolation))
    for case in done.cases.values():
        assert case["status"] == "completed"
        assert [step["step"] for step in case["steps"]] == [1, 2, 3, 4, 5]
    assert restarted(done) == {"unlucky-dp2", "neighbour-dp2"}
    assert_gone(tmp_path)


def test_baseline_that_starts_once_more_is_waited_for_by_what_needs_its_weights(run_fake: RunFake) -> None:
    """Its checkpoint goes when it starts anew, and what had started with it starts anew as well, after that."""
    baseline = case_document("unluckysaves-baseline")
    dependent = two_ranks("needs-weights", "unluckysaves-baseline")
    done = run_fake(baseline, dependent, case_document("train-wide", "unluckysaves-baseline", data=4))
    assert [case["status"] for case in done.cases.values()] == ["completed"] * 3
    assert restarted(done) == {"unluckysaves-baseline", "needs-weights"}


def test_rank_that_raised_before_has_failed(run_fake: RunFake) -> None:
    case = run_fake(BASELINE, two_ranks("raisesfirst-dp2")).cases["raisesfirst-dp2"]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exception", 1)
    assert "planted" in case["failure"]["message"]
    assert case["restarted"] is None


def test_one_that_died_unnoticed_is_replaced_before_the_next_case(
    run_fake: RunFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the moment in which ranks are to be started."""
    acquire = Pool.acquire
    killed = []

    def acquire_from_a_dead_one(self: Pool, devices: Any, logs: Any, **options: Any) -> Any:
        if len(devices) == 2 and not killed:
            assert self._server is not None
            killed.append(self._server._process.pid)
            self._server._process.kill()
            self._server._process.wait()
        return acquire(self, devices, logs, **options)

    monkeypatch.setattr(Pool, "acquire", acquire_from_a_dead_one)
    done = run_fake(BASELINE, two_ranks("train-a"), two_ranks("train-b"))
    assert killed
    assert {case["status"] for case in done.cases.values()} == {"completed"}


def test_failure_has_what_nccl_wrote_into_the_ranks_log(run_fake: RunFake) -> None:
    failed = run_fake(BASELINE, two_ranks("nccl-dp2")).cases["nccl-dp2"]
    assert failed["failure"]["message"].endswith("unhandled cuda error; NCCL warns: Cuda failure 2 'out of memory'")


@pytest.mark.parametrize(
    ("name", "set_to", "expected"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", None, "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "8"),
        ("NCCL_DEBUG", None, "WARN"),
        ("NCCL_DEBUG", "INFO", "INFO"),
    ],
)
def test_ranks_have_the_variables_that_the_run_is_given(
    monkeypatch: pytest.MonkeyPatch, name: str, set_to: str | None, expected: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if set_to:
        monkeypatch.setenv(name, set_to)
    assert rank_variables("cuda")[name] == expected
