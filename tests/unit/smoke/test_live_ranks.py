"""Rank processes that stay alive: reused, replaced after failures, and side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document
from unit.smoke.processes import assert_gone

from envbuild_smoke.run.options import Options

RunFake = Callable[..., list[Document]]
BASELINE = case_document("train-baseline")


def two_ranks(name: str, baseline: str = "train-baseline", **changes: object) -> Document:
    return {**case_document(name, baseline, data=2), **changes}


def by_id(lines: list[Document]) -> dict[str, Document]:
    return {line["case"]: line for line in lines if line["type"] == "case"}


def pids(out: Path, case: str) -> list[str]:
    return [path.read_text() for path in sorted((out / "cases" / case).glob("rank*.pid"))]


def told(out: Path, case: str) -> list[Document]:
    return [json.loads(path.read_text()) for path in sorted((out / "cases" / case).glob("rank*.told"))]


def test_next_case_runs_in_the_same_processes(run_fake: RunFake, tmp_path: Path) -> None:
    cases = by_id(run_fake(BASELINE, two_ranks("train-a"), two_ranks("train-b"), two_ranks("train-c")))
    assert {line["status"] for line in cases.values()} == {"completed"}
    assert [cases[name]["fresh_processes"] for name in ("train-baseline", "train-a", "train-b", "train-c")] == [
        1, 1, 0, 0,
    ]  # fmt: skip
    # The baseline's process is the first of the others'.
    assert pids(tmp_path, "train-a")[0] == pids(tmp_path, "train-baseline")[0]
    assert pids(tmp_path, "train-a") == pids(tmp_path, "train-b") == pids(tmp_path, "train-c")
    assert_gone(tmp_path)


@pytest.mark.parametrize("what", ["raises", "exits", "killed", "hangs", "orphans", "short"])
def test_processes_of_a_case_that_failed_are_replaced(run_fake: RunFake, tmp_path: Path, what: str) -> None:
    broken = two_ranks(f"{what}-dp2", **({"time_limit_seconds": 1.5} if what == "hangs" else {}))
    cases = by_id(run_fake(BASELINE, two_ranks("train-a"), broken, two_ranks("train-b")))
    assert cases["train-b"]["status"] == "completed"
    # What ends well with too few steps has nothing wrong with its processes.
    fresh = 0 if what == "short" else 2
    assert cases["train-b"]["fresh_processes"] == fresh
    same = set(pids(tmp_path, "train-a")) & set(pids(tmp_path, "train-b"))
    assert len(same) == 2 - fresh
    assert_gone(tmp_path)


def test_failure_leaves_processes_of_other_cases_alone(run_fake: RunFake, tmp_path: Path) -> None:
    """Four places: two cases at a time."""
    wide = {**case_document("train-wide", "train-baseline", data=4)}
    cases = by_id(
        run_fake(
            BASELINE, wide, two_ranks("killed-a"), two_ranks("train-b"), two_ranks("train-c"), two_ranks("train-d")
        )
    )
    assert cases["killed-a"]["status"] == "failed"
    assert cases["killed-a"]["devices"] == [0, 1]
    assert cases["train-b"]["devices"] == [2, 3]
    assert pids(tmp_path, "train-b") == pids(tmp_path, "train-wide")[2:]
    later = [cases[name] for name in ("train-c", "train-d")]
    assert {line["status"] for line in later} == {"completed"}
    assert_gone(tmp_path)


def test_isolated_cases_get_new_interpreters(run_fake: RunFake, tmp_path: Path) -> None:
    run, *_ = lines = run_fake(
        BASELINE, two_ranks("train-a"), two_ranks("meets-b"), options=Options(isolation="process")
    )
    cases = by_id(lines)
    assert run["isolation"] == "process"
    assert {line["status"] for line in cases.values()} == {"completed"}
    assert [line["fresh_processes"] for line in cases.values()] == [1, 2, 2]
    seen = [pid for name in cases for pid in pids(tmp_path, name)]
    assert len(set(seen)) == 5
    assert_gone(tmp_path)


def test_isolated_case_that_is_killed_or_hangs_ends_alone(run_fake: RunFake, tmp_path: Path) -> None:
    options = Options(isolation="process")
    hanging = two_ranks("hangs-a", time_limit_seconds=6)
    cases = by_id(run_fake(BASELINE, hanging, two_ranks("killed-b"), two_ranks("train-c"), options=options))
    assert [line["status"] for line in cases.values()] == ["completed", "timed-out", "failed", "completed"]
    assert "wait_for_nothing" in (tmp_path / cases["hangs-a"]["failure"]["log"]).read_text()
    assert_gone(tmp_path)


def test_dependents_run_beside_a_baseline_that_saved_its_weights(run_fake: RunFake, tmp_path: Path) -> None:
    """The baseline ends only once its dependent ran: waiting for its end, the run would time out."""
    baseline = case_document("saves-baseline")
    wide = case_document("train-wide", "saves-baseline", data=4)
    # Short enough, as estimated, not to delay the large one, which waits for all four places.
    opens = two_ranks("opens-case", "saves-baseline", estimated_seconds=0.1)
    lines = run_fake({**baseline, "time_limit_seconds": 60, "estimated_seconds": 100}, opens, wide)
    assert [line["status"] for line in lines[1:-1]] == ["completed"] * 3
    cases = by_id(lines)
    baseline, opens = cases["saves-baseline"], cases["opens-case"]
    assert opens["started_seconds"] < baseline["started_seconds"] + baseline["seconds"]
    assert set(opens["devices"]).isdisjoint(baseline["devices"])
    assert lines[3]["case"] == "train-wide"


def test_ranks_meet_at_the_socket_that_rank_0_was_handed(run_fake: RunFake) -> None:
    cases = by_id(run_fake(BASELINE, *[two_ranks(f"meets-{number}") for number in range(5)]))
    assert {line["status"] for line in cases.values()} == {"completed"}


def test_logs_are_kept_apart(run_fake: RunFake, tmp_path: Path) -> None:
    run_fake(BASELINE, two_ranks("prints-a"), two_ranks("prints-b"))
    for case in ("prints-a", "prints-b"):
        for rank in (0, 1):
            log = (tmp_path / "cases" / case / f"rank{rank}.log").read_text()
            assert log.count(f"C of {rank} in {case}\n") == 1
            assert log.count(f"Python of {rank} in {case}") == 1
            assert log.count(" in prints-") == 2


def test_stopped_rank_ends_its_case_at_the_limit(run_fake: RunFake, tmp_path: Path) -> None:
    cases = by_id(run_fake(BASELINE, two_ranks("stopped-a", time_limit_seconds=1), two_ranks("train-b")))
    assert (cases["stopped-a"]["status"], cases["stopped-a"]["failure"]["kind"]) == ("timed-out", "timeout")
    assert cases["train-b"]["status"] == "completed"
    assert_gone(tmp_path)


def test_exit_with_0_and_nothing_done_has_failed(run_fake: RunFake) -> None:
    case = by_id(run_fake(BASELINE, two_ranks("silent-a")))["silent-a"]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exit", 0)
    assert case["failure"]["exit_status"] == 0
    assert "before it was done" in case["failure"]["message"]


def test_exception_after_the_last_step_has_failed(run_fake: RunFake) -> None:
    case = by_id(run_fake(BASELINE, two_ranks("late-a")))["late-a"]
    assert [step["step"] for step in case["steps"]] == [1, 2, 3, 4, 5]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exception", 0)
    assert case["failure"]["message"] == "RuntimeError: planted in the teardown"


def test_number_that_is_not_finite_has_a_kind_of_its_own(run_fake: RunFake) -> None:
    assert by_id(run_fake(case_document("nan-baseline")))["nan-baseline"]["failure"]["kind"] == "not-finite"


def test_repeats_have_folders_and_baselines_of_their_own(run_fake: RunFake, tmp_path: Path) -> None:
    lines = run_fake(BASELINE, two_ranks("train-a"), repeats=3)
    runs = sorted((line["case"], line["repeat"], line["status"]) for line in lines if line["type"] == "case")
    assert runs == [(name, n, "completed") for name in ("train-a", "train-baseline") for n in (1, 2, 3)]
    assert lines[-1]["cases"] == 6
    third = next(line for line in lines if line.get("case") == "train-a" and line["repeat"] == 3)
    assert third["logs"] == [f"repeat-3/cases/train-a/rank{rank}.log" for rank in (0, 1)]
    assert "hello from rank 1" in (tmp_path / third["logs"][1]).read_text()


def test_weights_are_compared_once_both_ended(run_fake: RunFake, tmp_path: Path) -> None:
    case = two_ranks("train-a", compare_weights=True)
    lines = run_fake(BASELINE, case, two_ranks("train-b"), two_ranks("train-bad", compare_weights=True))
    cases = by_id(lines)
    assert cases["train-a"]["weights"]["compared_with"] == "train-baseline"
    assert cases["train-b"]["weights"] is None
    assert (cases["train-bad"]["status"], cases["train-bad"]["weights"]) == ("failed", None)
    failure = cases["train-bad"]["failure"]
    assert failure["message"] == "comparing the final weights: ValueError: planted in the comparison"
    assert "planted in the comparison" in (tmp_path / failure["log"]).read_text()
    # Told to keep the weights they end with: those that are compared, and their baseline.
    assert [told(tmp_path, name)[0]["save"] for name in ("train-baseline", "train-a", "train-b")] == [True, True, False]


@pytest.mark.parametrize("broken", ["baseline", "case"])
def test_weights_of_a_case_that_failed_are_not_compared(run_fake: RunFake, broken: str) -> None:
    baseline = case_document("leaves-baseline" if broken == "baseline" else "train-baseline")
    name = "raises-a" if broken == "case" else "train-a"
    lines = run_fake(baseline, two_ranks(name, baseline["id"], compare_weights=True))
    case = by_id(lines)[name]
    assert case["status"] == ("not-run" if broken == "baseline" else "failed")
    assert case["weights"] is None


def test_bandwidth_is_measured_after_the_cases_by_new_processes(run_fake: RunFake, tmp_path: Path) -> None:
    wanted = {"ranks": 2, "sizes_bytes": [1024, 4096], "floor_gigabytes_per_second": None}
    lines = run_fake(BASELINE, two_ranks("train-a"), bandwidth=wanted)
    assert [line["type"] for line in lines] == ["run", "case", "case", "bandwidth", "end"]
    sweep = lines[3]
    assert (sweep["ranks"], sweep["backend"], sweep["failure"]) == (2, "gloo", None)
    assert [point["bytes"] for point in sweep["points"]] == [1024, 4096]
    assert set(pids(tmp_path, "bandwidth")).isdisjoint(pids(tmp_path, "train-a"))
    assert_gone(tmp_path)


def test_what_the_driver_observed_is_in_the_result(run_fake: RunFake) -> None:
    cases = by_id(run_fake(case_document("observes-baseline")))
    assert cases["observes-baseline"]["observed"] == {"layer_spec": "local", "libraries": {}}


def test_places_on_the_cpu_are_told(run_fake: RunFake, tmp_path: Path) -> None:
    run, *_ = run_fake(BASELINE, case_document("train-wide", "train-baseline", data=4))
    assert run["devices"] == list(range(max(4, len(os.sched_getaffinity(0)))))
    assert [rank["device_index"] for rank in told(tmp_path, "train-wide")] == [0, 1, 2, 3]


def test_module_that_cannot_be_imported_is_a_finding(run_fake: RunFake) -> None:
    run, *_ = run_fake(BASELINE, expected_modules=["json", "no_such_module", "fake_dies", "math"])
    findings = {line["package"]: line["found"] for line in run["environment_findings"]}
    assert findings.keys() == {"no_such_module", "fake_dies"}
    assert findings["no_such_module"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "died while it imported it" in findings["fake_dies"]
    assert {line["code"] for line in run["environment_findings"]} == {"module-missing"}
