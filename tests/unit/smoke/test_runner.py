"""What the runner makes of ranks that fail: real processes, a fake rank program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document
from unit.smoke.processes import assert_gone

from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run.options import Isolation, Options
from envbuild_smoke.run.pool import Pool
from envbuild_smoke.run.runner import UnusableEnvironmentError

RunFake = Callable[..., list[Document]]
BASELINE = case_document("train-baseline")


def two_ranks(what: str, **changes: object) -> Document:
    return {**case_document(f"{what}-dp2", "train-baseline", data=2), **changes}


def test_cases_that_end_well(run_fake: RunFake, tmp_path: Path) -> None:
    run, baseline, case, end = run_fake(BASELINE, two_ranks("train"))
    assert run["type"] == "run"
    assert run["nonce"] == "0123456789abcdef" * 2
    assert [baseline["status"], case["status"]] == ["completed", "completed"]
    assert [step["step"] for step in case["steps"]] == [1, 2, 3, 4, 5]
    assert case["steps"][4]["loss"] == 2.0
    assert case["failure"] is None
    assert case["logs"] == ["cases/train-dp2/rank0.log", "cases/train-dp2/rank1.log"]
    assert "hello from rank 1 of 2" in (tmp_path / case["logs"][1]).read_text()
    assert 0 <= case["startup_seconds"] <= case["seconds"] < 60
    assert (end["cases"], end["completed"]) == (2, 2)


@pytest.mark.parametrize(
    ("what", "rank", "kind", "exit_status", "words"),
    [
        ("raises", 1, "exception", 1, "ValueError: planted in rank 1"),
        ("exits", 1, "exit", 3, "exited with status 3"),
        ("killed", 0, "signal", -9, "SIGKILL"),
        ("leaves", 0, "exit", 4, "exited with status 4"),
    ],
)
def test_earliest_failing_rank_is_reported(
    run_fake: RunFake, tmp_path: Path, what: str, rank: int, kind: str, exit_status: int, words: str
) -> None:
    _, _, case, after, end = run_fake(BASELINE, two_ranks(what), two_ranks("train"))
    failure = case["failure"]
    assert case["status"] == "failed"
    assert (failure["rank"], failure["kind"], failure["exit_status"]) == (rank, kind, exit_status)
    assert words in failure["message"]
    assert failure["log"] == f"cases/{what}-dp2/rank{rank}.log"
    # Its log has what it printed, though it was not flushed when the rank died.
    assert f"hello from rank {rank} of 2" in (tmp_path / failure["log"]).read_text()
    # A dead rank ends its case within the grace, not at its time limit, and the run goes on.
    assert case["seconds"] < 60
    assert after["status"] == "completed"
    assert (end["cases"], end["completed"]) == (3, 2)
    assert_gone(tmp_path)


def test_hanging_rank_ends_at_the_time_limit(run_fake: RunFake, tmp_path: Path) -> None:
    _, _, case, after, _ = run_fake(BASELINE, two_ranks("hangs", time_limit_seconds=1.5), two_ranks("train"))
    assert case["status"] == "timed-out"
    assert (case["failure"]["kind"], case["failure"]["rank"]) == ("timeout", 1)
    assert "after 1.5 s" in case["failure"]["message"]
    assert "ranks still running: 1;" in case["failure"]["message"]
    assert 1.5 < case["seconds"] < 60
    # The log says where: the stack of the rank is in it.
    assert "wait_for_nothing" in (tmp_path / case["failure"]["log"]).read_text()
    assert after["status"] == "completed"
    assert_gone(tmp_path)


@pytest.mark.parametrize("what", ["managed", "asked"])
def test_what_a_rank_raises_after_the_time_limit_is_not_the_cause(run_fake: RunFake, tmp_path: Path, what: str) -> None:
    case = run_fake(BASELINE, two_ranks(what, time_limit_seconds=1.5))[2]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("timed-out", "timeout", 1)
    assert "ranks still running: 1;" in case["failure"]["message"]
    # What the rank started gets no signal before all of it is killed; so only a rank that is asked itself raises.
    assert (tmp_path / "cases" / f"{what}-dp2" / "rank1.failure.json").exists() == (what == "asked")
    assert_gone(tmp_path)


def test_rank_that_raised_before_the_time_limit_is_the_cause(run_fake: RunFake, tmp_path: Path) -> None:
    case = run_fake(BASELINE, two_ranks("lingers", time_limit_seconds=1.5))[2]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exception", 1)
    assert case["failure"]["message"] == "ValueError: planted in rank 1"
    assert_gone(tmp_path)


def test_process_left_behind_by_a_rank_is_killed(run_fake: RunFake, tmp_path: Path) -> None:
    assert run_fake(BASELINE, two_ranks("orphans"))[2]["status"] == "completed"
    assert_gone(tmp_path)


def test_case_that_is_not_finite_has_failed(run_fake: RunFake) -> None:
    case = run_fake({**BASELINE, "id": "nan-baseline"})[1]
    assert case["status"] == "failed"
    assert case["failure"]["message"] == "FloatingPointError: step 2: loss is nan"
    assert [step["step"] for step in case["steps"]] == [1]


def test_case_with_too_few_steps_has_failed(run_fake: RunFake) -> None:
    case = run_fake(BASELINE, two_ranks("short"))[2]
    assert (case["status"], case["failure"]["kind"]) == ("failed", "incomplete")
    assert "[1], not 1 to 5" in case["failure"]["message"]


@pytest.mark.parametrize(("what", "state"), [("killed", "failed"), ("hangs", "timed-out")])
def test_cases_of_a_failed_baseline_are_not_run(run_fake: RunFake, what: str, state: str) -> None:
    broken = {**BASELINE, "id": f"{what}-baseline"}
    if what == "hangs":
        # Its rank 0 ends at once; a case of one rank hangs by ignoring everything.
        broken |= {"id": "ignores-baseline", "time_limit_seconds": 1}
    dependent = case_document("train-dp2", broken["id"], data=2)
    healthy = [BASELINE, case_document("train-tp2", "train-baseline", tensor=2)]
    results = {line["case"]: line for line in run_fake(broken, dependent, *healthy)[1:-1]}
    assert results[broken["id"]]["status"] == state
    assert results["train-dp2"]["status"] == "not-run"
    assert results["train-dp2"]["failure"]["kind"] == "baseline-missing"
    assert broken["id"] in results["train-dp2"]["failure"]["message"]
    assert results["train-dp2"]["startup_seconds"] is None
    assert results["train-tp2"]["status"] == "completed"


def by_name(lines: list[Document]) -> dict[str, Document]:
    return {line["case"]: line for line in lines if line["type"] == "case"}


def test_case_under_which_the_template_dies_twice_has_failed(run_fake: RunFake, tmp_path: Path) -> None:
    cases = by_name(run_fake(BASELINE, two_ranks("parricide"), two_ranks("train")))
    case, after = cases["parricide-dp2"], cases["train-dp2"]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exit", None)
    assert "died" in case["failure"]["message"]
    assert "was killed by SIGKILL" in case["restarted"]
    assert case["seconds"] < 60
    assert (after["status"], after["restarted"]) == ("completed", None)
    assert_gone(tmp_path)


@pytest.mark.parametrize("isolation", ["live", "process"])
def test_death_of_the_template_fails_no_case_that_its_ranks_did_not_fail(
    run_fake: RunFake, tmp_path: Path, isolation: Isolation
) -> None:
    """Two cases run when it dies, and one waits; all ranks that ran die with it."""
    wide = case_document("train-wide", "train-baseline", data=4)
    running = [two_ranks("unlucky", estimated_seconds=50), two_ranks("beside", estimated_seconds=50)]
    later = two_ranks("train-later", estimated_seconds=1)
    cases = by_name(run_fake(BASELINE, wide, *running, later, options=Options(isolation=isolation)))
    assert {case["status"] for case in cases.values()} == {"completed"}
    for case in cases.values():
        assert [step["step"] for step in case["steps"]] == [1, 2, 3, 4, 5]
    again = {name for name, case in cases.items() if case["restarted"] and "was killed by SIGKILL" in case["restarted"]}
    assert again == {"unlucky-dp2", "beside-dp2"}
    assert_gone(tmp_path)


def test_baseline_that_is_run_once_more_is_waited_for_by_what_needs_its_weights(
    run_fake: RunFake, tmp_path: Path
) -> None:
    """Its checkpoint goes when it begins anew, and what had begun with it begins anew as well, after that."""
    baseline = {**case_document("unluckysaves-baseline"), "estimated_seconds": 50}
    dependent = case_document("needs-weights", "unluckysaves-baseline", data=2)
    wide = case_document("train-wide", "unluckysaves-baseline", data=4)
    cases = by_name(run_fake(baseline, {**dependent, "estimated_seconds": 0.1}, wide))
    assert [case["status"] for case in cases.values()] == ["completed"] * 3
    assert "was killed by SIGKILL" in cases["unluckysaves-baseline"]["restarted"]
    assert "was killed by SIGKILL" in cases["needs-weights"]["restarted"]
    assert cases["train-wide"]["restarted"] is None
    assert_gone(tmp_path)


def test_rank_that_raised_before_the_template_died_has_failed(run_fake: RunFake) -> None:
    case = by_name(run_fake(BASELINE, two_ranks("raisesfirst")))["raisesfirst-dp2"]
    assert (case["status"], case["failure"]["kind"], case["failure"]["rank"]) == ("failed", "exception", 1)
    assert "planted" in case["failure"]["message"]
    assert case["restarted"] is None


def test_rank_that_is_killed_is_not_given_another_try(run_fake: RunFake) -> None:
    case = by_name(run_fake(BASELINE, two_ranks("killed")))["killed-dp2"]
    assert (case["status"], case["failure"]["kind"], case["restarted"]) == ("failed", "signal", None)


def test_template_that_died_unheard_is_replaced_before_the_next_case(
    run_fake: RunFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the moment in which ranks are to be started."""
    acquire = Pool.acquire
    killed = []

    def acquire_from_a_dead_one(self: Pool, devices: Any, logs: Any, **options: Any) -> Any:
        if len(devices) == 2 and not killed:
            assert self._template is not None
            killed.append(self._template._process.pid)
            self._template._process.kill()
            self._template._process.wait()
        return acquire(self, devices, logs, **options)

    monkeypatch.setattr(Pool, "acquire", acquire_from_a_dead_one)
    cases = by_name(run_fake(BASELINE, two_ranks("train-a"), two_ranks("train-b")))
    assert killed
    assert {case["status"] for case in cases.values()} == {"completed"}


def test_comparison_under_which_the_template_dies_is_made_once_more(run_fake: RunFake) -> None:
    program = RankProgram(entry="fake_ranks:main", compare="fake_ranks:compare_unluckily")
    lines = run_fake(BASELINE, two_ranks("train-a", compare_weights=True), program=program)
    case = by_name(lines)["train-a-dp2"]
    assert (case["status"], case["weights"]["compared_with"]) == ("completed", "train-baseline")
    assert "was killed by SIGKILL" in case["restarted"]


def test_library_that_cannot_be_imported_makes_the_environment_unusable(run_fake: RunFake, tmp_path: Path) -> None:
    with pytest.raises(UnusableEnvironmentError, match="No module named 'no_such_library'"):
        run_fake(BASELINE, program=RankProgram(entry="fake_ranks:main", preload=("no_such_library",)))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "no_such_library" in lines[0]
    assert '"completed": 0' in lines[1]


def test_results_are_never_overwritten(run_fake: RunFake, tmp_path: Path) -> None:
    run_fake(BASELINE)
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(FileExistsError):
        run_fake(BASELINE)
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_ranks_get_threads_and_addresses(run_fake: RunFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("MASTER_PORT", "1")
    run_fake(BASELINE, two_ranks("environment"))
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["GLOO_SOCKET_IFNAME"] == "lo"
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert int(seen["MASTER_PORT"]) > 1024
    # A process group of its own: whatever it starts can be killed with it.
    assert seen["group"] == seen["pid"] != str(os.getpgid(0))


def test_on_gpus_the_caches_of_compilers_are_beside_the_results(
    run_fake: RunFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton writes below the home, which cannot be written in an image that is mounted read-only."""
    given: list[dict[str, str]] = []

    class NoGpusHere(Pool):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            given.append(dict(self.variables))

    monkeypatch.setattr("envbuild_smoke.run.runner.Pool", NoGpusHere)
    with pytest.raises(ValueError, match="devices"):
        run_fake(BASELINE, device="cuda", gpu={"sm": ["90"]})
    assert given == [
        {
            "TRITON_CACHE_DIR": str(tmp_path / "caches" / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches" / "inductor"),
        }
    ]
    (tmp_path / "results.jsonl").unlink()
    run_fake(BASELINE)
    assert given[1] == {}
