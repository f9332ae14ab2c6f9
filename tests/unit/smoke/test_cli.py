"""The command line as a process: exit codes, progress, and what is left when it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document, plan_document
from unit.smoke.processes import assert_gone

HERE = Path(__file__).resolve().parent
SMOKE = HERE.parents[2] / "smoke"
REAL = [sys.executable, str(SMOKE)]
FAKE = [sys.executable, str(HERE / "run_with_fake_ranks.py")]


def plan_file(folder: Path, *cases: Document) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_document(*cases)))
    return str(path)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def results(out: Path) -> list[Document]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_run_prints_events_and_exits_0(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, case_document("train-baseline"))
    done = run(*FAKE, "run", "--plan", plan, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["case-started", *["step"] * 5, "case-finished"]
    about = {"case": "train-baseline", "repeat": 1}
    assert events[0] == {"event": "case-started", **about, "index": 1, "total": 1, "devices": [0]}
    assert events[1] == {"event": "step", **about, "step": 1, "loss": 6.0, "grad_norm": 1.0}
    assert events[-1]["status"] == "completed"
    assert "1 of 1 cases completed" in done.stderr


def test_run_of_a_failing_case_exits_1_and_names_the_log(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, case_document("leaves-baseline"))
    done = run(*FAKE, "run", "--plan", plan, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "leaves-baseline: failed: exited with status 4" in done.stderr
    assert "cases/leaves-baseline/rank0.log" in done.stderr
    assert "0 of 1 cases completed" in done.stderr


@pytest.mark.parametrize("damage", ["plan", "only", "results"])
def test_refused_run_exits_2_and_writes_nothing(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    plan = plan_file(tmp_path, case_document("train-baseline"))
    command = [*FAKE, "run", "--plan", plan, "--out", str(out)]
    if damage == "plan":
        Path(plan).write_text('{"schema": "envbuild.plan/2"}')
        words = "plan.nonce: missing"
    elif damage == "only":
        command += ["--only", "train-tp2"]
        words = "the plan has train-baseline"
    else:
        out.mkdir()
        (out / "results.jsonl").write_text("precious")
        words = "already holds results.jsonl"
    done = run(*command)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in out.glob("*")] == (["results.jsonl"] if damage == "results" else [])
    if damage == "results":
        assert (out / "results.jsonl").read_text() == "precious"


def test_disk_that_is_full_exits_5_and_a_rerun_goes_on(tmp_path: Path) -> None:
    """A limit to the size of files is what fills the disk: the results' file grows to it."""
    cases = [case_document("train-baseline")]
    cases += [case_document(f"train-{name}", "train-baseline", data=2) for name in "abcdef"]
    out = tmp_path / "out"
    command = [*FAKE, "run", "--plan", plan_file(tmp_path, *cases), "--out", str(out)]
    limited = ["prlimit", "--fsize=6000", *command]
    done = run(*limited)
    assert done.returncode == 5
    assert "cannot be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert_gone(out)
    again = run(*command, "--resume")
    assert again.returncode == 0, again.stderr
    assert results(out)[-1]["completed"] == 7


@pytest.mark.parametrize("what", ["a file", "no right"])
def test_out_that_cannot_be_made_exits_5(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out" if what == "a file" else Path("/proc/out")
    done = run(*FAKE, "run", "--plan", plan_file(tmp_path, case_document("train-baseline")), "--out", str(out))
    assert done.returncode == 5
    assert "Traceback" not in done.stderr


def test_only_brings_the_baseline_along(tmp_path: Path) -> None:
    cases = [case_document("train-baseline")]
    cases += [case_document(f"train-{name}", "train-baseline", data=2) for name in ("a", "b")]
    out = tmp_path / "out"
    done = run(*FAKE, "run", "--plan", plan_file(tmp_path, *cases), "--out", str(out), "--only", "train-b")
    assert done.returncode == 0, done.stderr
    assert [line["case"] for line in results(out)[1:-1]] == ["train-baseline", "train-b"]


def test_environment_without_the_stack_exits_3(tmp_path: Path) -> None:
    """The tests' own environment has no torch; the real rank program says so."""
    plan = plan_document(case_document("train-baseline"))
    plan["expected_versions"] = {"torch": "2.13.0+cpu"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "out"
    # -S: no site-packages, whatever happens to be installed there.
    done = run(sys.executable, "-S", str(SMOKE), "run", "--plan", str(tmp_path / "plan.json"), "--out", str(out))
    assert done.returncode == 3
    assert "No module named 'torch'" in done.stderr
    line, end = results(out)
    codes = {finding["code"] for finding in line["environment_findings"]}
    assert codes == {"package-missing", "unusable"}
    assert end["completed"] == 0


def test_info_prints_the_environment() -> None:
    done = run(*REAL, "info")
    assert done.returncode == 0
    environment = json.loads(done.stdout)
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["versions"]["pytest"]
    assert "torch.cuda.current_device" in environment["cuda_redirects"]


def start_and_wait_for_second_case(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    cases = [case_document("train-baseline"), case_document("ignores-dp2", "train-baseline", data=2)]
    out = tmp_path / "out"
    command = [*FAKE, "run", "--plan", plan_file(tmp_path, *cases), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["case"] == "ignores-dp2" and event["step"] == 5:
            break
    return process, out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_kills_all_ranks_and_keeps_finished_results(tmp_path: Path, number: signal.Signals) -> None:
    process, out = start_and_wait_for_second_case(tmp_path)
    # Less than the time limit of the case, and than the ranks sleep.
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert [line["type"] for line in results(out)] == ["run", "case"]
    assert results(out)[1]["status"] == "completed"
    assert_gone(out)


def test_runner_that_watches_its_standard_input_ends_when_that_is_closed(tmp_path: Path) -> None:
    """Whoever started it holds the other end, and is gone; bytes that come say nothing."""
    cases = [case_document("train-baseline"), case_document("ignores-dp2", "train-baseline", data=2)]
    out = tmp_path / "out"
    command = [*FAKE, "run", "--plan", plan_file(tmp_path, *cases), "--out", str(out), "--end-with-stdin"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("words\n")
    process.stdin.flush()
    for line in process.stdout:
        if json.loads(line)["event"] == "step" and json.loads(line)["case"] == "ignores-dp2":
            break
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=60) == 130
    process.stdout.close()
    assert [line["type"] for line in results(out)] == ["run", "case"]
    assert_gone(out)


def test_kill_of_the_runner_leaves_no_rank(tmp_path: Path) -> None:
    process, out = start_and_wait_for_second_case(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert [line["type"] for line in results(out)] == ["run", "case"]
    assert_gone(out)


def test_kill_of_runner_and_template_leaves_no_rank(tmp_path: Path) -> None:
    process, out = start_and_wait_for_second_case(tmp_path)
    template = int((out / "template").read_text())
    # Stopped, it cannot do anything for its ranks before it dies.
    os.kill(template, signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=60)
    os.kill(template, signal.SIGKILL)
    for child in out.glob("cases/*/child*.pid"):
        # What a rank started is nobody's then: the kernel tells the ranks alone.
        os.kill(int(child.read_text()), signal.SIGKILL)
    assert_gone(out)


def test_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    cases = [case_document("train-baseline"), case_document("train-dp2", "train-baseline", data=2)]
    out = tmp_path / "out"
    command = [*FAKE, "run", "--plan", plan_file(tmp_path, *cases), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert results(out)[-1]["completed"] == 2


def test_runner_does_not_import_the_stack() -> None:
    """Only the template process pays for torch; the runner and its checks start at once."""
    code = (
        "import sys; from envbuild_smoke import cli; from envbuild_smoke.run import runner;"
        "sys.exit(any(name.partition('.')[0] in ('torch', 'megatron', 'numpy') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SMOKE)}, check=False)
    assert done.returncode == 0
