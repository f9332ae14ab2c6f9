"""The command line: exit statuses, progress, and what is left after it was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.smoke_plans import plan_document, read_results
from unit.smoke.conftest import BASELINE, FAKE_COMMAND, HERE, Command, two_ranks, write_plan
from unit.smoke.processes import assert_gone

from envbuild_smoke import cli

SMOKE = HERE.parents[2] / "smoke"

Smoke = Callable[..., Command]


def test_run_prints_events_and_exits_0(smoke: Smoke, tmp_path: Path) -> None:
    done = smoke("run", "--plan", write_plan(tmp_path, BASELINE), "--out", tmp_path / "out")
    assert done.status == 0, done.errors
    events = done.events
    assert [event["event"] for event in events] == ["case-started", *["step"] * 5, "case-finished"]
    about = {"case": "train-baseline", "repeat": 1}
    assert events[0] == {"event": "case-started", **about, "index": 1, "total": 1, "devices": [0]}
    assert events[1] == {"event": "step", **about, "step": 1, "loss": 6.0, "grad_norm": 1.0}
    assert events[-1]["status"] == "completed"
    assert "1 of 1 cases completed" in done.errors


@pytest.mark.parametrize(
    ("arguments", "document", "words"),
    [
        ((), {"schema": "envbuild.plan/4"}, "plan.nonce: missing"),
        (("--only", "train-tp2"), None, "the plan has train-baseline"),
        (("--gpus", "0"), None, "--gpus has no effect: the plan is for device cpu"),
        (("--image", "/nowhere.sqsh"), None, "--image /nowhere.sqsh cannot be read"),
    ],
)
def test_refused_run_exits_2_and_writes_nothing(
    smoke: Smoke, tmp_path: Path, arguments: tuple[str, ...], document: object, words: str
) -> None:
    plan = write_plan(tmp_path, BASELINE)
    if document is not None:
        plan.write_text(json.dumps(document))
    done = smoke("run", "--plan", plan, "--out", tmp_path / "out", *arguments)
    assert (done.status, done.output) == (2, "")
    assert words in done.errors
    assert not (tmp_path / "out").exists()


def test_existing_results_are_refused_and_kept(smoke: Smoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text("precious")
    done = smoke("run", "--plan", write_plan(tmp_path, BASELINE), "--out", out)
    assert done.status == 2
    assert "already has results.jsonl" in done.errors
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("results.jsonl", "precious")]


def test_full_disk_exits_5_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    """A limit to the size of files is what fills the disk: the results' file grows to it."""
    out = tmp_path / "out"
    # Many steps: of all files that are written, the results are the largest.
    long = {**BASELINE["training"], "steps": 100}
    plan = write_plan(tmp_path, BASELINE, *(two_ranks(f"train-{name}", training=long) for name in "abcdef"))
    command = [*FAKE_COMMAND, "run", "--plan", str(plan), "--out", str(out)]
    done = subprocess.run(
        ["prlimit", "--fsize=20000", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 5
    assert "cannot be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert_gone(out)
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert read_results(out)[-1]["completed"] == 7


def test_out_that_cannot_be_made_exits_5(smoke: Smoke, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = smoke("run", "--plan", write_plan(tmp_path, BASELINE), "--out", tmp_path / "file" / "out")
    assert done.status == 5
    assert "cannot be written" in done.errors
    assert "Nothing was run" in done.errors


@pytest.mark.parametrize(("form", "key"), [("sqsh", "sqsh_digest"), ("oci", "oci_digest")])
def test_another_image_than_the_plans_is_refused_before_anything_trains(
    smoke: Smoke, tmp_path: Path, form: str, key: str
) -> None:
    image = tmp_path / "image"
    image.write_text("another")
    right = f"sha256:{hashlib.sha256(b'another').hexdigest()}"
    for digest, status in (("sha256:00", 2), (right, 0)):
        plan = write_plan(tmp_path, BASELINE, subject={"form": form, key: digest})
        done = smoke("run", "--plan", plan, "--out", tmp_path / "out", "--image", image)
        assert done.status == status, done.errors
        assert (f"is {right}, and the plan is for sha256:00" in done.errors) is (status == 2)
    done = smoke("run", "--plan", plan, "--out", tmp_path / "again")
    assert (done.status, f"the plan is for image {right}: name the file" in done.errors) == (2, True)


def test_environment_without_the_stack_exits_3(tmp_path: Path) -> None:
    """The tests' own environment has no torch; the real rank program reports that."""
    plan = write_plan(tmp_path, BASELINE, expected_versions={"torch": "2.13.0+cpu"})
    out = tmp_path / "out"
    # -S: no site-packages, whatever happens to be installed there.
    command = [sys.executable, "-S", str(SMOKE), "run", "--plan", str(plan), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    assert "No module named 'torch'" in done.stderr
    line, end = read_results(out)
    assert {finding["code"] for finding in line["environment_findings"]} == {"package-missing", "unusable"}
    assert end["completed"] == 0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, in its second case, whose ranks ignore signals."""
    plan = write_plan(tmp_path, BASELINE, two_ranks("ignores-dp2"))
    command = [*FAKE_COMMAND, "run", "--plan", str(plan), "--out", str(tmp_path / "out"), "--end-with-stdin"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # What comes over its standard input does not count, only its end.
        process.stdin.write("words\n")
        process.stdin.flush()
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "step" and event["case"] == "ignores-dp2" and event["step"] == 5:
                break
        assert process.poll() is None
        yield process
        process.kill()


@pytest.mark.parametrize(
    "how",
    [
        "SIGTERM",
        pytest.param("SIGINT", marks=pytest.mark.slow),
        "end of standard input",
        "SIGKILL",
        "SIGKILL with its server",
    ],
)
def test_run_that_is_stopped_leaves_no_rank_and_keeps_finished_results(
    started: subprocess.Popen[str], tmp_path: Path, how: str
) -> None:
    out = tmp_path / "out"
    if how in ("SIGTERM", "SIGINT"):
        started.send_signal(signal.Signals[how])
    elif how == "end of standard input":
        assert started.stdin is not None
        started.stdin.close()
    elif how == "SIGKILL":
        started.kill()
    else:
        server = int((out / "forkserver").read_text())
        # Stopped, it cannot do anything for its ranks before it dies.
        os.kill(server, signal.SIGSTOP)
        started.kill()
        started.wait(timeout=300)
        os.kill(server, signal.SIGKILL)
        for child in out.glob("cases/*/child*.pid"):
            # No process is left that could end what a rank started: the kernel ends the ranks alone.
            os.kill(int(child.read_text()), signal.SIGKILL)
    assert started.wait(timeout=300) == (-9 if "SIGKILL" in how else 130)
    assert started.stderr is not None
    errors = started.stderr.read()
    assert "Traceback" not in errors
    # It ended by itself, before the watchdog's grace was over.
    assert ("interrupted: all ranks were killed" in errors) == ("SIGKILL" not in how)
    assert [line["type"] for line in read_results(out)] == ["run", "case"]
    assert read_results(out)[1]["status"] == "completed"
    assert_gone(out)


def test_closed_output_does_not_end_the_run(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, BASELINE, two_ranks("train-dp2"))
    command = [*FAKE_COMMAND, "run", "--plan", str(plan), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert read_results(tmp_path / "out")[-1]["completed"] == 2


def test_gpus_that_are_missing_are_an_event_and_exit_4(
    smoke: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_document(BASELINE) | {"device": "cuda", "gpu": {"sm": ["90a"]}}))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = smoke("run", "--plan", plan, "--out", tmp_path / "out")
    assert done.status == 4
    (event,) = done.events
    assert (event["event"], event["reason"]) == ("cannot-run", "no-driver")
    assert event["message"] in done.errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0,,1", ""])
def test_gpus_must_be_a_list(smoke: Smoke, tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        smoke("run", "--plan", tmp_path, "--out", tmp_path, "--gpus", text)
    assert caught.value.code == cli.BAD_PLAN
    assert "must be a list of GPUs" in capfd.readouterr().err


def test_runner_does_not_import_the_stack() -> None:
    """Only the fork server pays for torch; the runner and its checks start at once."""
    code = (
        "import sys; from envbuild_smoke import cli, runner;"
        "sys.exit(any(name.partition('.')[0] in ('torch', 'megatron', 'numpy') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SMOKE)}, check=False)
    assert done.returncode == 0


def test_a_python_that_is_too_old_exits_3(tmp_path: Path) -> None:
    """Of the entry alone: what it imports is not parsed by such a Python."""
    entry = SMOKE / "__main__.py"
    old = "import sys, runpy; sys.version_info = (3, 9); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", old, entry], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("envbuild-smoke needs Python 3.10 or newer")) == (3, True)
