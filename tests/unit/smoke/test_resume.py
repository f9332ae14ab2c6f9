"""Runs that were interrupted and are resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document, read_results
from unit.smoke.conftest import (
    BASELINE,
    FAKE,
    FAKE_COMMAND,
    Command,
    fake_ranks,
    run_into,
    two_ranks,
    without_packages,
    write_plan,
)  # fmt: skip
from unit.smoke.processes import assert_gone

from envbuild_smoke import runner
from envbuild_smoke.plan.reader import read_plan
from envbuild_smoke.results import Finding, Gpu, Image
from envbuild_smoke.run import resume
from envbuild_smoke.run.context import RunInterruptedError
from envbuild_smoke.run.options import Options

Smoke = Callable[..., Command]
H200 = Gpu(0, "GPU-0", "NVIDIA H200", "143771 MiB", "570", "9.0")


def interrupt(folder: Path, when: Callable[[Document], bool]) -> None:
    """Run the plan in the folder and stop it, as SIGTERM does, at the first such event."""
    stop = threading.Event()
    plan = read_plan(folder / "plan.json")
    options = Options(program=FAKE)

    def emit(event: Document) -> None:
        if when(event):
            stop.set()

    with pytest.raises(RunInterruptedError), without_packages():
        runner.run_plan(plan, plan.cases, folder / "out", emit=emit, stop=stop, options=options)


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan whose third case reports its steps and waits for the file ``go``: stopped there."""
    folder = tmp_path_factory.mktemp("interrupted")
    write_plan(folder, BASELINE, *map(two_ranks, ("train-b", "waits-c", "train-d")))
    with fake_ranks():
        interrupt(folder, lambda event: event["event"] == "step" and event["case"] == "waits-c")
    return folder


@pytest.fixture
def waiting(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(interrupted, tmp_path / "copy"))


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went to its end, with a case that failed."""
    folder = tmp_path_factory.mktemp("ended")
    cases = (BASELINE, two_ranks("raises-b"))
    write_plan(folder, *cases)
    with fake_ranks():
        run_into(folder / "out", *cases)
    return folder


def run(smoke: Smoke, folder: Path, *more: str | Path) -> Command:
    return smoke("run", "--plan", folder / "plan.json", "--out", folder / "out", *more)


def test_killed_run_is_resumed(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, BASELINE, *map(two_ranks, ("train-b", "waits-c", "train-d")))
    out = tmp_path / "out"
    command = [*FAKE_COMMAND, "run", "--plan", plan, "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["case"] == "waits-c":
            break
    process.kill()
    process.communicate(timeout=300)
    assert_gone(out)
    before = read_results(out)
    assert [line["type"] for line in before] == ["run", "case", "case"]
    (out / "go").touch()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = read_results(out)
    # Finished results are as they were, byte for byte; the case that was cut off ran from its start.
    assert lines[: len(before)] == before
    assert [line["type"] for line in lines] == ["run", "case", "case", "resumed", "case", "case", "end"]
    names = [line["case"] for line in lines if line["type"] == "case"]
    assert names == ["train-baseline", "train-b", "waits-c", "train-d"]
    assert [step["step"] for step in lines[4]["steps"]] == [1, 2, 3, 4, 5]
    assert (lines[-1]["cases"], lines[-1]["completed"]) == (4, 4)
    assert "2 results are kept" in done.stderr
    assert "4 of 4 cases completed" in done.stderr


@pytest.mark.parametrize(("host", "kept"), [("h1", True), ("h2", False)])
def test_bandwidth_is_measured_again_on_other_hosts(
    run_fake: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, kept: bool
) -> None:
    sweep = {"ranks": 2, "sizes_bytes": [1024], "floor_gigabytes_per_second": None}
    changes = {"bandwidth": sweep, "nonce": "0" * 32}
    monkeypatch.setenv("SLURMD_NODENAME", "h1")
    run_fake(BASELINE, two_ranks("train-b"), **changes)
    results = tmp_path / "results.jsonl"
    # As if it was killed before its end.
    whole = "".join(results.read_text().splitlines(keepends=True)[:-1])
    results.write_text(whole)
    monkeypatch.setenv("SLURMD_NODENAME", host)
    run_fake(BASELINE, two_ranks("train-b"), options=Options(resume=True), **changes)
    types = [line["type"] for line in read_results(tmp_path)]
    assert types[-3:] == (["bandwidth", "resumed", "end"] if kept else ["resumed", "bandwidth", "end"])


def test_incomplete_line_is_cut_off(smoke: Smoke, waiting: Path) -> None:
    results = waiting / "out" / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole + b'{"schema": "envbuild.results/2", "type": "ca')
    (waiting / "out" / "go").touch()
    done = run(smoke, waiting, "--resume")
    assert done.status == 0, done.errors
    assert results.read_bytes().startswith(whole + b'{"schema": "envbuild.results/2", "type": "resumed"')
    assert read_results(waiting / "out")[3]["cut_bytes"] == 44
    assert "an incomplete last line of 44 bytes was cut off" in done.errors


def change_first_line(results: Path, **changes: object) -> None:
    first, rest = results.read_text().split("\n", maxsplit=1)
    results.write_text(json.dumps({**json.loads(first), **changes}) + "\n" + rest)


@pytest.mark.parametrize(
    ("number", "text", "words"),
    [
        (0, "[]", "does not begin with the line of a run"),
        (0, '{"type": "run"}', "does not begin with the line of a run"),
        (0, '{"type": "case"}', "does not begin with the line of a run"),
        (1, '{"type": "case"}', "a line cannot be read .case"),
        (1, '{"type": "case", "case": "c", "status": "s", "steps": 1, "failure": null}', "a line cannot be read .case"),
    ],
)
def test_damaged_results_are_refused_and_left(ended: Path, tmp_path: Path, number: int, text: str, words: str) -> None:
    lines = (ended / "out" / "results.jsonl").read_text().splitlines(keepends=True)
    results = tmp_path / "results.jsonl"
    results.write_text("".join([*lines[:number], text + "\n", *lines[number + 1 :]]))
    content = results.read_bytes()
    with pytest.raises(resume.ResumeError, match=words):
        resume.read_previous(tmp_path, read_plan(ended / "plan.json"))
    assert results.read_bytes() == content


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nonce", "belongs to another plan: its nonce is"),
        ("plan", "belongs to another plan: its plan_digest is"),
        ("environment", "environment.versions differ"),
    ],
)
def test_run_of_something_else_is_not_resumed_and_left(smoke: Smoke, waiting: Path, what: str, words: str) -> None:
    results = waiting / "out" / "results.jsonl"
    if what == "plan":
        write_plan(waiting, BASELINE, two_ranks("train-b"))
    elif what == "nonce":
        change_first_line(results, nonce="f" * 32)
    else:
        environment = read_results(waiting / "out")[0]["environment"]
        change_first_line(results, environment={**environment, "versions": {"pytest": "0.1"}})
        with results.open("a") as file:
            file.write('{"incomplete')
    content = results.read_bytes()
    done = run(smoke, waiting, "--resume")
    assert done.status == 2
    assert words in done.errors
    assert results.read_bytes() == content


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("smoke_digest", "sha256:0"),
        ("image", Image(file_digest="sha256:0", file_bytes=0, fingerprint=None)),
        ("isolation", "process"),
        ("environment_findings", (Finding(code="startup-code", package=None, expected=None, found=None),)),
        ("environment.python", "3.0"),
        ("environment.files", {}),
        ("environment.device", "cuda"),
        ("machine.gpus", (H200,)),
    ],
)
def test_run_in_another_environment_is_not_resumed(ended: Path, path: str, value: object) -> None:
    previous = resume.read_previous(ended / "out", read_plan(ended / "plan.json"))
    line = previous.run_line
    resume.check_same_environment(previous, line)
    parent, _, last = path.rpartition(".")
    changed = replace(getattr(line, parent) if parent else line, **{last: value})
    with pytest.raises(resume.ResumeError, match=f": {path} differ"):
        resume.check_same_environment(previous, replace(line, **{parent: changed}) if parent else changed)


def test_resume_of_nothing_just_starts(smoke: Smoke, tmp_path: Path) -> None:
    write_plan(tmp_path, BASELINE)
    assert run(smoke, tmp_path, "--resume").status == 0
    assert [line["type"] for line in read_results(tmp_path / "out")] == ["run", "case", "end"]


def test_resume_of_a_whole_run_does_nothing(smoke: Smoke, ended: Path) -> None:
    content = (ended / "out" / "results.jsonl").read_bytes()
    done = run(smoke, ended, "--resume")
    # A case that failed has ended.
    assert done.status == 1
    log = ended / "out" / "cases" / "raises-b" / "rank1.log"
    assert f"raises-b: failed: ValueError: planted in rank 1 (log: {log})" in done.errors
    assert "1 of 2 cases completed" in done.errors
    assert (ended / "out" / "results.jsonl").read_bytes() == content


def test_run_whose_checkpoints_are_gone_is_not_resumed_and_left(smoke: Smoke, tmp_path: Path) -> None:
    write_plan(tmp_path, case_document("saves-baseline"), *(two_ranks(f"train-{n}", "saves-baseline") for n in "bcd"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "go").touch()
    assert run(smoke, tmp_path, "--only", "train-b").status == 0
    assert [line["case"] for line in read_results(out)[1:-1]] == ["saves-baseline", "train-b"]
    # With the checkpoint there, only what is missing runs.
    assert run(smoke, tmp_path, "--resume", "--only", "train-c").started == ["train-c"]
    content = (out / "results.jsonl").read_bytes()
    shutil.rmtree(out / "checkpoints")
    done = run(smoke, tmp_path, "--resume")
    assert (done.status, done.started) == (2, [])
    assert "train-d needs the checkpoint" in done.errors
    assert (out / "results.jsonl").read_bytes() == content


def test_two_runs_do_not_share_a_directory(smoke: Smoke, waiting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LOCK_SECONDS", 0.0)
    lock = resume.lock_folder(waiting / "out")
    done = run(smoke, waiting, "--resume")
    assert done.status == 2
    assert "in use by another run" in done.errors
    os.close(lock)
    os.close(resume.lock_folder(waiting / "out"))


def test_case_whose_rank_was_told_to_end_is_trained_again(waiting: Path) -> None:
    # Slurm sends SIGTERM to all processes of a job: a rank may be gone before the runner has noticed.
    out = waiting / "out"
    failure = {"kind": "terminated", "message": "killed by SIGTERM", "rank": 1, "exit_status": -15, "log": None}
    told = {**read_results(out)[-1], "case": "waits-c", "status": "failed", "failure": failure}
    with (out / "results.jsonl").open("a") as results:
        results.write(json.dumps(told) + "\n")
    (out / "go").touch()
    with fake_ranks(), without_packages():
        plan = read_plan(waiting / "plan.json")
        options = Options(program=FAKE, resume=True)
        stop = threading.Event()
        done = runner.run_plan(plan, plan.cases, out, emit=lambda _: None, stop=stop, options=options)
    assert [case.status for case in done] == ["completed"] * 4
