"""Runs that were interrupted, in every way, and go on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document, plan_document
from unit.smoke.processes import assert_gone

HERE = Path(__file__).resolve().parent
FAKE = [sys.executable, str(HERE / "run_with_fake_ranks.py")]
BASELINE = case_document("train-baseline")


def two_ranks(name: str, **changes: object) -> Document:
    return {**case_document(name, "train-baseline", data=2), **changes}


def command(folder: Path, *more: str) -> list[str]:
    return [*FAKE, "run", "--plan", str(folder / "plan.json"), "--out", str(folder / "out"), *more]


def write_plan(folder: Path, *cases: Document, **changes: object) -> None:
    (folder / "plan.json").write_text(json.dumps({**plan_document(*cases), **changes}))


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=120, check=False)


def lines_of(folder: Path) -> list[Document]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A plan whose third case reports its steps and then waits for the file ``go``."""
    write_plan(tmp_path, BASELINE, two_ranks("train-b"), two_ranks("waits-c"), two_ranks("train-d"))
    return tmp_path


def interrupt_waiting(folder: Path, number: signal.Signals) -> int:
    """Start a run, signal it in its third case, and return its exit status."""
    process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["case"] == "waits-c":
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_goes_on(waiting: Path, number: signal.Signals) -> None:
    status = interrupt_waiting(waiting, number)
    assert status == (-9 if number == signal.SIGKILL else 130)
    assert_gone(waiting / "out")
    before = lines_of(waiting)
    assert [line["type"] for line in before] == ["run", "case", "case"]
    (waiting / "out" / "go").touch()
    done = run(waiting, "--resume")
    assert done.returncode == 0, done.stderr
    lines = lines_of(waiting)
    # Finished results are as they were, byte for byte; the case that was cut off ran from its start.
    assert lines[: len(before)] == before
    assert [line["type"] for line in lines] == ["run", "case", "case", "resumed", "case", "case", "end"]
    assert [line["case"] for line in lines if line["type"] == "case"] == [
        "train-baseline", "train-b", "waits-c", "train-d",
    ]  # fmt: skip
    waits = lines[4]
    assert [step["step"] for step in waits["steps"]] == [1, 2, 3, 4, 5]
    assert (lines[-1]["cases"], lines[-1]["completed"]) == (4, 4)
    assert "2 results are kept" in done.stderr
    assert "4 of 4 cases completed" in done.stderr


def test_half_written_line_is_cut_off_and_told(waiting: Path) -> None:
    interrupt_waiting(waiting, signal.SIGKILL)
    results = waiting / "out" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole + b'{"schema": "envbuild.results/2", "type": "ca')
    (waiting / "out" / "go").touch()
    done = run(waiting, "--resume")
    assert done.returncode == 0, done.stderr
    assert results.read_bytes().startswith(whole + b'{"schema": "envbuild.results/2", "type": "resumed"')
    assert lines_of(waiting)[3]["cut_bytes"] == 44
    assert "a last line of 44 bytes, not written to its end, was cut off" in done.stderr


@pytest.mark.parametrize(("what", "words"), [("nonce", "its nonce is"), ("plan", "its plan_digest is")])
def test_results_of_another_plan_are_refused_and_left(waiting: Path, what: str, words: str) -> None:
    interrupt_waiting(waiting, signal.SIGKILL)
    results = waiting / "out" / "results.jsonl"
    if what == "plan":
        write_plan(waiting, BASELINE, two_ranks("train-b"))
    else:
        first, rest = results.read_text().split("\n", maxsplit=1)
        results.write_text(json.dumps({**json.loads(first), "nonce": "f" * 32}) + "\n" + rest)
    content = results.read_bytes()
    done = run(waiting, "--resume")
    assert done.returncode == 2
    assert "belongs to another plan" in done.stderr
    assert words in done.stderr
    assert results.read_bytes() == content


@pytest.mark.parametrize(
    ("number", "text", "words"),
    [
        (0, "[]", "does not begin with the line of a run"),
        (0, '{"type": "run"}', "does not begin with the line of a run"),
        (0, '{"type": "case"}', "does not begin with the line of a run"),
        (1, '{"type": "case"}', "the line of a case is none"),
        (1, '{"type": "case", "case": "c", "status": "s", "steps": 1, "failure": null}', "the line of a case is none"),
    ],
)
def test_results_that_are_damaged_are_refused_in_words_and_left(
    tmp_path: Path, number: int, text: str, words: str
) -> None:
    write_plan(tmp_path, BASELINE)
    assert run(tmp_path).returncode == 0
    results = tmp_path / "out" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join([*lines[:number], text + "\n", *lines[number + 1 :]]))
    content = results.read_bytes()
    done = run(tmp_path, "--resume")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert results.read_bytes() == content


@pytest.mark.parametrize("what", ["isolation", "image", "environment"])
def test_run_does_not_go_on_in_another_environment(waiting: Path, what: str) -> None:
    interrupt_waiting(waiting, signal.SIGKILL)
    results = waiting / "out" / "results.jsonl"
    more = ["--resume"]
    if what == "isolation":
        more += ["--isolation", "process"]
    elif what == "image":
        (waiting / "image.sqsh").write_text("an image")
        more += ["--image", str(waiting / "image.sqsh")]
    else:
        first, rest = results.read_text().split("\n", maxsplit=1)
        line = json.loads(first)
        line["environment"]["versions"]["pytest"] = "0.1"
        results.write_text(json.dumps(line) + "\n" + rest)
    content = results.read_bytes()
    done = run(waiting, *more)
    assert done.returncode == 2
    assert f"{what}{'.versions' if what == 'environment' else ''} differ" in done.stderr
    assert results.read_bytes() == content


def test_resume_of_nothing_just_starts(tmp_path: Path) -> None:
    write_plan(tmp_path, BASELINE)
    assert run(tmp_path, "--resume").returncode == 0
    assert [line["type"] for line in lines_of(tmp_path)] == ["run", "case", "end"]


def test_resume_of_a_whole_run_does_nothing(tmp_path: Path) -> None:
    write_plan(tmp_path, BASELINE, two_ranks("raises-b"))
    assert run(tmp_path).returncode == 1
    content = (tmp_path / "out" / "results.jsonl").read_bytes()
    done = run(tmp_path, "--resume")
    # A case that failed has ended.
    assert done.returncode == 1
    assert "raises-b: failed: ValueError: planted in rank 1" in done.stderr
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == content


def test_resume_adds_the_cases_that_only_left_out(tmp_path: Path) -> None:
    write_plan(tmp_path, BASELINE, two_ranks("train-b"), two_ranks("train-c"))
    assert run(tmp_path, "--only", "train-b").returncode == 0
    (tmp_path / "out" / "checkpoints" / "train-baseline" / "initial").mkdir(parents=True)
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert [line["type"] for line in lines_of(tmp_path)] == ["run", "case", "case", "resumed", "case", "end"]
    assert lines_of(tmp_path)[-1]["cases"] == 3


def test_baseline_whose_checkpoint_is_gone_runs_again(tmp_path: Path) -> None:
    baseline = case_document("saves-baseline")
    cases = [{**case_document(f"train-{name}", "saves-baseline", data=2)} for name in "bc"]
    write_plan(tmp_path, baseline, *cases)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "go").touch()
    assert run(tmp_path, "--only", "train-b").returncode == 0
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    started = [event for line in done.stdout.splitlines() if (event := json.loads(line))["event"] == "case-started"]
    assert [event["case"] for event in started] == ["saves-baseline", "train-c"]
    # Its result is that of the first time.
    assert [line["case"] for line in lines_of(tmp_path) if line["type"] == "case"] == [
        "saves-baseline", "train-b", "train-c",
    ]  # fmt: skip
    # With the checkpoint there, only what is missing runs.
    assert (tmp_path / "out" / "checkpoints" / "saves-baseline" / "initial").is_dir()


def test_baseline_that_fails_when_it_runs_again_takes_its_cases_along(tmp_path: Path) -> None:
    """Its own result of the first time stays."""
    baseline = case_document("once-baseline")
    cases = [{**case_document(f"train-{name}", "once-baseline", data=2)} for name in "bc"]
    write_plan(tmp_path, baseline, *cases)
    assert run(tmp_path, "--only", "train-b").returncode == 0
    done = run(tmp_path, "--resume")
    assert done.returncode == 1, done.stderr
    lines = lines_of(tmp_path)
    statuses = [(line["case"], line["status"]) for line in lines if line["type"] == "case"]
    assert statuses == [("once-baseline", "completed"), ("train-b", "completed"), ("train-c", "not-run")]
    assert (lines[-1]["cases"], lines[-1]["completed"]) == (3, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("checkpoint", ["there", "gone"])
def test_trained_case_is_compared_without_training_again(
    tmp_path: Path, number: signal.Signals, checkpoint: str
) -> None:
    """The baseline saved its weights and goes on: a case of it is trained, and waits for its end."""
    baseline = case_document("saves-baseline")
    write_plan(tmp_path, baseline, {**case_document("final-b", "saves-baseline"), "compare_weights": True})
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert any(json.loads(line)["event"] == "case-trained" for line in process.stdout)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert [line["type"] for line in lines_of(tmp_path)] == ["run"]
    if checkpoint == "gone":
        shutil.rmtree(tmp_path / "out" / "checkpoints" / "final-b")
    (tmp_path / "out" / "go").touch()
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    started = [event for line in done.stdout.splitlines() if (event := json.loads(line))["event"] == "case-started"]
    wanted = ["saves-baseline"] if checkpoint == "there" else ["saves-baseline", "final-b"]
    assert [event["case"] for event in started] == wanted
    case = lines_of(tmp_path)[-2]
    assert (case["case"], case["status"], len(case["steps"])) == ("final-b", "completed", 5)
    assert case["weights"]["compared_with"] == "saves-baseline"


def test_trained_case_of_which_half_was_written_is_trained_again(tmp_path: Path) -> None:
    write_plan(tmp_path, BASELINE, two_ranks("train-b"))
    assert run(tmp_path, "--only", "train-baseline").returncode == 0
    write_plan(tmp_path, BASELINE, two_ranks("train-b", compare_weights=True))
    results = tmp_path / "out" / "results.jsonl"
    digest = "sha256:" + hashlib.sha256((tmp_path / "plan.json").read_bytes()).hexdigest()
    first, rest = results.read_text().split("\n", maxsplit=1)
    results.write_text(json.dumps({**json.loads(first), "plan_digest": digest}) + "\n" + rest)
    folder = tmp_path / "out" / "cases" / "train-b"
    folder.mkdir()
    (folder / "trained.json").write_text('{"case": "train-b", "status": "completed", "st')
    for case in ("train-baseline", "train-b"):
        (tmp_path / "out" / "checkpoints" / case / "final").mkdir(parents=True)
        (tmp_path / "out" / "checkpoints" / case / "initial").mkdir(parents=True)
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert '"case-started", "case": "train-b"' in done.stdout


def test_two_runs_do_not_share_a_directory(waiting: Path) -> None:
    process = subprocess.Popen(command(waiting), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    done = run(waiting, "--resume")
    assert done.returncode == 2
    assert "in use by another run" in done.stderr
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
