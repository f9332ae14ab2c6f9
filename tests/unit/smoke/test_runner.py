"""What the runner makes of ranks that end well and of ranks that fail: real processes, a fake rank program."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from helpers.smoke_plans import case_document
from unit.smoke.conftest import BASELINE, SHORT_LIMIT, Done, finding_codes, two_ranks
from unit.smoke.processes import assert_gone, is_alive

from envbuild_smoke.environment import gpus
from envbuild_smoke.plan.axes import Layout
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.run.options import Options
from envbuild_smoke.run.pool import Pool
from envbuild_smoke.run.results import ResultsWriter
from envbuild_smoke.run.task_run import TaskRun

RunFake = Callable[..., Done]


def test_cases_that_end_well(one_by_one: Done) -> None:
    run, *_, end = one_by_one.lines
    assert (run["type"], run["nonce"], run["isolation"]) == ("run", "0123456789abcdef" * 2, "live")
    case = one_by_one.cases["train-a"]
    assert (case["status"], case["failure"], case["restarted"]) == ("completed", None, None)
    assert [step["step"] for step in case["steps"]] == [1, 2, 3, 4, 5]
    assert case["steps"][4]["loss"] == 2.0
    assert case["logs"] == ["cases/train-a/rank0.log", "cases/train-a/rank1.log"]
    assert "hello from rank 1 of 2" in (one_by_one.out / case["logs"][1]).read_text()
    assert 0 <= case["startup_seconds"] <= case["seconds"]
    completed = sum(case["status"] == "completed" for case in one_by_one.cases.values())
    assert (end["cases"], end["completed"]) == (len(one_by_one.cases), completed)


GROWS = {"resume_at": 2, "continue_in": as_json(Layout(data=4))}


def test_resumed_case_is_trained_by_as_many_ranks_as_its_second_part_has(run_fake: RunFake) -> None:
    halved = {**case_document("train-halved", "train-baseline", data=4), "resume_at": 2}
    done = run_fake(BASELINE, two_ranks("train-grown", **GROWS), {**halved, "continue_in": as_json(Layout(data=2))})
    for name, sizes in (("train-grown", [2, 4]), ("train-halved", [4, 2])):
        case = done.cases[name]
        assert (case["status"], [step["step"] for step in case["steps"]]) == ("completed", [1, 2, 3, 4, 5])
        assert (len(case["devices"]), len(case["logs"]), case["nodes"]) == (4, 4, [0])
        greetings = [greeting_lines(done.out / log) for log in case["logs"]]
        assert greetings == [
            [f"hello from rank {rank} of {size}, {size} here" for size in sizes if rank < size] for rank in range(4)
        ]


def greeting_lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("hello")]


def test_failure_in_the_second_part_is_that_of_the_case(run_fake: RunFake) -> None:
    case = run_fake(BASELINE, two_ranks("raiseslater", **GROWS)).cases["raiseslater"]
    failure = case["failure"]
    assert (case["status"], failure["rank"], failure["node"]) == ("failed", 2, 0)
    assert failure["message"] == "ValueError: planted in the second part"
    assert [step["step"] for step in case["steps"]][:2] == [1, 2]


def test_second_part_does_not_begin_where_the_first_one_failed(run_fake: RunFake) -> None:
    done = run_fake(BASELINE, two_ranks("raises", **GROWS))
    case = done.cases["raises"]
    assert (case["failure"]["rank"], len(case["logs"])) == (1, 2)


def test_case_begins_anew_where_the_fork_server_dies_in_its_second_part(run_fake: RunFake) -> None:
    case = run_fake(BASELINE, two_ranks("unluckylater", **GROWS)).cases["unluckylater"]
    assert (case["status"], [step["step"] for step in case["steps"]]) == ("completed", [1, 2, 3, 4, 5])
    assert "SIGKILL" in case["restarted"]


def test_states_of_the_gpus_are_read_when_no_rank_is_left(
    run_fake: RunFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def states(_used: object) -> list[dict[str, str]]:
        pids = [file.read_text() for file in tmp_path.glob("cases/*/*.pid")]
        read.append(sum(is_alive(pid) for pid in pids))
        return []

    monkeypatch.setattr(gpus, "states", states)
    run_fake(BASELINE)
    # Before the first case, and after the last.
    assert read == [0, 0]


@pytest.mark.parametrize(
    ("what", "rank", "kind", "exit_status", "words"),
    [
        ("raises", 1, "exception", 1, "ValueError: planted in rank 1"),
        ("exits", 1, "exit", 3, "exited with status 3"),
        ("killed", 0, "signal", -9, "SIGKILL"),
        ("leaves", 0, "exit", 4, "exited with status 4"),
        ("silent", 0, "exit", 0, "before it was done"),
        ("late", 0, "exception", 1, "RuntimeError: planted in the teardown"),
        ("short", None, "incomplete", 0, "[1], not 1 to 5"),
        ("nan-baseline", 0, "not-finite", 1, "FloatingPointError: step 2: loss is nan"),
        # It raised before its time was over, and was not gone when that came.
        ("lingers", 1, "exception", ANY, "ValueError: planted in rank 1"),
    ],
)
def test_earliest_failing_rank_is_reported(
    one_by_one: Done, at_once: Done, what: str, rank: int | None, kind: str, exit_status: int, words: str
) -> None:
    name = what if "-" in what else f"{what}-dp2"
    done = one_by_one if name in one_by_one.cases else at_once
    case = done.cases[name]
    failure = case["failure"]
    assert case["status"] == "failed"
    assert (failure["rank"], failure["kind"], failure["exit_status"]) == (rank, kind, exit_status)
    assert words in failure["message"]
    if rank is not None:
        assert failure["log"] == f"cases/{name}/rank{rank}.log"
        # Its log has what it printed, though it was not flushed when the rank died.
        assert f"hello from rank {rank} of" in (done.out / failure["log"]).read_text()
    # The death of a rank is no reason for another try, and the steps before it are kept.
    assert case["restarted"] is None
    steps = {"late": [1, 2, 3, 4, 5], "nan-baseline": [1], "short": [1]}
    if what in steps:
        assert [step["step"] for step in case["steps"]] == steps[what]


@pytest.mark.parametrize("what", ["hangs", "managed", "signalled", "stopped"])
def test_rank_that_hangs_ends_its_case_at_the_time_limit(at_once: Done, what: str) -> None:
    """What a rank raises after the limit, at the signal for its stacks or as its helpers die, is not the cause."""
    case = at_once.cases[f"{what}-dp2"]
    assert (case["status"], case["failure"]["kind"]) == ("timed-out", "timeout")
    assert f"after {SHORT_LIMIT} s" in case["failure"]["message"]
    if what != "stopped":
        assert case["failure"]["rank"] == 1
        assert "ranks still running: 1;" in case["failure"]["message"]
    if what == "hangs":
        # The stack of the rank is in its log.
        assert "wait_for_nothing" in (at_once.out / case["failure"]["log"]).read_text()


def test_no_process_is_left(one_by_one: Done, at_once: Done) -> None:
    assert_gone(one_by_one.out)
    assert_gone(at_once.out)


@pytest.mark.parametrize(("what", "state"), [("killed", "failed"), ("ignores", "timed-out")])
def test_cases_of_a_failed_baseline_are_not_run(at_once: Done, what: str, state: str) -> None:
    assert at_once.cases[f"{what}-baseline"]["status"] == state
    case = at_once.cases[f"train-of-{what}"]
    assert (case["status"], case["failure"]["kind"]) == ("not-run", "baseline-missing")
    assert f"{what}-baseline" in case["failure"]["message"]
    assert (case["startup_seconds"], case["weights"]) == (None, None)
    assert at_once.cases["train-last"]["status"] == "completed"


def test_weights_are_compared_where_the_plan_says_so(at_once: Done) -> None:
    cases = at_once.cases
    assert cases["train-compared"]["weights"]["compared_with"] == "train-baseline"
    assert cases["train-last"]["weights"] is None
    assert (cases["train-bad"]["status"], cases["train-bad"]["weights"]) == ("failed", None)
    failure = cases["train-bad"]["failure"]
    assert (failure["rank"], failure["message"]) == (0, "ValueError: planted in the comparison")
    assert "planted in the comparison" in (at_once.out / failure["log"]).read_text()
    # Only weights that are compared are kept: those of a case, and of its baseline.
    names = ("train-baseline", "train-compared", "train-last")
    assert [at_once.context(name)[0]["save"] for name in names] == [True, True, False]


def test_bandwidth_is_measured_after_the_cases_by_new_processes(at_once: Done) -> None:
    assert [line["type"] for line in at_once.lines[-2:]] == ["bandwidth", "end"]
    sweep = at_once.lines[-2]
    assert (sweep["ranks"], sweep["backend"], sweep["failure"]) == (2, "gloo", None)
    assert [point["bytes"] for point in sweep["points"]] == [1024, 4096]
    # Devices on the CPU are numbers.
    assert at_once.lines[0]["devices"] == list(range(12))
    assert [rank["device_index"] for rank in at_once.context("train-wide")] == list(range(12))
    others = {pid for name in at_once.cases for pid in at_once.pids(name)}
    assert len(at_once.pids("bandwidth")) == 2
    assert others.isdisjoint(at_once.pids("bandwidth"))


def test_observed_settings_and_lazy_imports_are_in_the_result(one_by_one: Done) -> None:
    observed = one_by_one.cases["observes-dp2"]["observed"]
    assert (observed["layer_spec"], observed["libraries"]) == ("local", {})
    unlisted = one_by_one.cases["lazily-a"]["observed"]["unlisted"]
    assert ("imported-unlisted", "fake_apex") in [(finding["code"], finding["package"]) for finding in unlisted]


def test_report_that_is_not_of_its_type_fails_its_case(run_fake: RunFake) -> None:
    done = run_fake(BASELINE, two_ranks("misreports-a"), two_ranks("train-b"))
    assert [line["status"] for line in done.cases.values()] == ["completed", "failed", "completed"]
    message = done.cases["misreports-a"]["failure"]["message"]
    assert message == 'its report.observed.parameters: found "all"; must be a whole number, 0 or more'


def test_environment_findings_are_in_the_first_line(one_by_one: Done) -> None:
    codes = finding_codes(one_by_one.lines[0])
    assert codes["package-missing"] == {"no-such-package"}
    assert codes["module-missing"] == {"no_such_module", "fake_dies"}
    # An expected module's own file, and no module that only a rank will import.
    assert "processes" in codes["imported-unlisted"]
    assert "fake_apex" not in codes["imported-unlisted"]
    by_package = {finding["package"]: finding["found"] for finding in one_by_one.lines[0]["environment_findings"]}
    assert by_package["no_such_module"] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "died while it imported it" in by_package["fake_dies"]


def test_ranks_get_threads_and_addresses(one_by_one: Done) -> None:
    seen = dict(line.split("=", 1) for line in (one_by_one.out / "environment").read_text().splitlines())
    expected = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert expected.items() <= seen.items()
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert int(seen["MASTER_PORT"]) > 1024
    # A process group of its own: whatever it starts can be killed with it.
    assert seen["group"] == seen["pid"] != str(os.getpgid(0))


def test_logs_are_kept_apart(one_by_one: Done) -> None:
    for case in ("prints-a", "prints-b"):
        for rank in (0, 1):
            log = (one_by_one.out / "cases" / case / f"rank{rank}.log").read_text()
            assert log.count(f"C of {rank} in {case}\n") == 1
            assert log.count(f"Python of {rank} in {case}") == 1
            assert log.count(" in prints-") == 2


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("evidence")
    with pytest.raises(FileExistsError):
        ResultsWriter(tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == "evidence"


def test_repeats_have_folders_and_baselines_of_their_own(run_fake: RunFake, tmp_path: Path) -> None:
    lines = run_fake(BASELINE, two_ranks("train-a"), repeats=3).lines
    runs = sorted((line["case"], line["repeat"], line["status"]) for line in lines if line["type"] == "case")
    assert runs == [(name, n, "completed") for name in ("train-a", "train-baseline") for n in (1, 2, 3)]
    third = next(line for line in lines if line.get("case") == "train-a" and line["repeat"] == 3)
    assert third["logs"] == [f"repeat-3/cases/train-a/rank{rank}.log" for rank in (0, 1)]
    assert "hello from rank 1" in (tmp_path / third["logs"][1]).read_text()


def test_on_gpus_the_caches_of_compilers_are_in_the_output(
    run_fake: RunFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's default is below the home, which cannot be written in an image that is mounted read-only."""
    given: list[dict[str, str]] = []

    class NoGpusError(Exception):
        pass

    def start_server(self: Pool) -> None:
        given.append(dict(self.variables))
        raise NoGpusError

    monkeypatch.setattr(Pool, "start_server", start_server)
    for device, gpu in (("cuda", {"sm": ["90"]}), ("cpu", None)):
        with pytest.raises(NoGpusError):
            run_fake(BASELINE, device=device, gpu=gpu)
    folder = tmp_path / "caches"
    assert given == [
        {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        {},
    ]


def test_dependents_run_during_a_baseline_that_saved_its_weights(run_fake: RunFake) -> None:
    """The baseline ends only once its dependent ran: waiting for its end, the run would time out."""
    baseline = {**case_document("saves-baseline"), "time_limit_seconds": 600}
    wide = case_document("train-wide", "saves-baseline", data=4)
    opens = two_ranks("opens-case", "saves-baseline")
    done = run_fake(baseline, opens, wide)
    assert [line["status"] for line in done.lines[1:-1]] == ["completed"] * 3
    first, opened = done.cases["saves-baseline"], done.cases["opens-case"]
    assert opened["started_seconds"] < first["started_seconds"] + first["seconds"]
    assert set(opened["devices"]).isdisjoint(first["devices"])
    assert done.lines[3]["case"] == "train-wide"


def test_next_case_runs_in_the_same_processes(one_by_one: Done) -> None:
    cases = one_by_one.cases
    fresh = [cases[name]["fresh_processes"] for name in ("train-baseline", "train-a", "train-b", "train-c")]
    assert fresh == [1, 1, 0, 0]
    # The baseline's process is the first of the others'.
    assert one_by_one.pids("train-a")[0] == one_by_one.pids("train-baseline")[0]
    assert one_by_one.pids("train-a") == one_by_one.pids("train-b") == one_by_one.pids("train-c")
    # The ranks of a case meet at the socket that rank 0 was handed, also when they are not new.
    assert {cases[name]["status"] for name in ("meets-a", "meets-b")} == {"completed"}


@pytest.mark.parametrize(
    ("number", "what"), list(enumerate(["raises", "exits", "killed", "leaves", "orphans", "silent", "late", "short"]))
)
def test_processes_of_a_case_that_failed_are_replaced(one_by_one: Done, number: int, what: str) -> None:
    after = one_by_one.cases[f"train-{number}"]
    assert after["status"] == "completed"
    # What ends well with too few steps has nothing wrong with its processes.
    fresh = 0 if what == "short" else 2
    assert after["fresh_processes"] == fresh
    same = set(one_by_one.pids(f"{what}-dp2")) & set(one_by_one.pids(f"train-{number}"))
    assert len(same) == 2 - fresh


def test_failure_leaves_processes_of_other_cases_alone(run_fake: RunFake) -> None:
    """Four devices: two cases at a time."""
    wide = case_document("train-wide", "train-baseline", data=4)
    done = run_fake(BASELINE, wide, *map(two_ranks, ("killed-a", "train-b", "train-c", "train-d")))
    assert (done.cases["killed-a"]["status"], done.cases["killed-a"]["devices"]) == ("failed", [0, 1])
    assert done.cases["train-b"]["devices"] == [2, 3]
    assert done.pids("train-b") == done.pids("train-wide")[2:]
    assert {done.cases[name]["status"] for name in ("train-c", "train-d")} == {"completed"}


def test_isolated_cases_get_new_interpreters_and_one_that_hangs_ends_with_its_stacks(
    run_fake: RunFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_running = TaskRun._check_running

    def until_it_hangs(run: TaskRun, now: float) -> None:
        """The time of the case is over once rank 1 alone is left and hangs, however long that takes."""
        if (run.task.folder / "hangs").exists() and run.processes[0].done:
            run.task = replace(run.task, limit_seconds=0)
        check_running(run, now)

    monkeypatch.setattr(TaskRun, "_check_running", until_it_hangs)
    names = ("train-a", "meets-b", "killed-c", "lazily-d", "hangs-e", "train-f")
    options = Options(isolation="process")
    done = run_fake(BASELINE, *map(two_ranks, names), options=options, expected_versions={"no-such-package": "1"})
    assert done.lines[0]["isolation"] == "process"
    ends = [line["status"] for line in done.cases.values()]
    assert ends == [*["completed"] * 3, "failed", "completed", "timed-out", "completed"]
    assert [line["fresh_processes"] for line in done.cases.values()] == [1, *[2] * 6]
    assert len({pid for name in done.cases for pid in done.pids(name)}) == 13
    # New interpreters report all that they imported.
    unlisted = {finding["package"] for finding in done.cases["lazily-d"]["observed"]["unlisted"]}
    assert {"fake_apex", "fake_ranks"} <= unlisted
    assert "wait_for_nothing" in (tmp_path / done.cases["hangs-e"]["failure"]["log"]).read_text()
    assert_gone(tmp_path)
