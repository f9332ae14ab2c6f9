"""What the runner's exit status means, and how an interrupted run goes on."""

import contextlib
import json
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.certify.readme import judge_command
from envbuild.certify.run.executors import MachineOptions, open_executor
from envbuild.certify.run.job import CertifyJob, make_job
from envbuild.cli.main import run
from envbuild.cli.report import as_json
from envbuild.core.errors import (
    CertificationCannotRunError,
    CertificationFailedError,
    ConfigurationError,
    InterruptedByUserError,
    MachineError,
    ResultsRefusedError,
    UsageError,
)
from envbuild.launch.gpus import find_driver

TP2 = "gpt-fp32-tp2"


def cannot_run(world, status, *output):
    world.status, world.output = status, list(output)
    with pytest.raises(CertificationCannotRunError) as caught:
        world.certify()
    assert caught.value.exit_code == 8
    assert world.certificates() == []
    return caught.value


@pytest.mark.parametrize(
    ("status", "reason"), [(2, "plan-refused"), (3, "image-lacks-stack"), (4, "gpus"), (1 << 7, "runner-ended")]
)
def test_runner_that_cannot_start_is_reported_with_its_reason(shared_world, status, reason):
    error = cannot_run(shared_world, status, "words", "envbuild-smoke: no module named torch")
    assert error.reason == reason
    assert "no module named torch" in error.why
    assert error.log.name == "smoke.log"


def test_certificate_from_before_stays_only_where_the_machine_is_to_blame(world):
    for status, stays in ((4, True), (3, False), (-9, False)):
        world.status = 0
        before = world.certify().certificate
        world.status = status
        with pytest.raises(CertificationCannotRunError):
            world.certify(fresh=True)
        assert before.exists() == stays
    world.status = 0
    assert world.certify().ran


@pytest.mark.parametrize("status", [-9, 137])
def test_killed_runner_is_reported_with_its_signal_and_resume(shared_world, status):
    error = cannot_run(shared_world, status, '{"event": "step", "case": "c"}', "words")
    assert error.why == "It was ended by SIGKILL (often: the machine ran out of memory).\nwords"
    assert "--resume" in error.fix
    assert error.reason == "runner-ended"


@pytest.mark.parametrize("reason", ["too-few-gpus", "gpus-in-use", "wrong-gpu", "no-driver"])
def test_gpus_that_are_not_as_the_plan_wants_have_a_reason(shared_world, reason):
    event = {"event": "cannot-run", "reason": reason, "message": "it needs others"}
    error = cannot_run(shared_world, 4, json.dumps(event))
    assert (error.reason, error.why, error.as_json()["reason"]) == (reason, "it needs others", reason)
    assert error.fix


@pytest.mark.parametrize(
    ("place", "hint"), [("sqsh", None), ("venv", "Install the lock"), ("here", "--in venv --venv DIR")]
)
def test_environment_without_the_stack_shows_the_command_that_installs_it(shared_world, monkeypatch, place, hint):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    world = shared_world
    world.status, world.output = 3, ["ModuleNotFoundError: No module named 'torch'"]
    with pytest.raises(CertificationCannotRunError) as caught:
        world.certify(place=place, **({} if place == "sqsh" else {"image": None}))
    sync = "envbuild sync --stack mcore --base debian12 --target cpu --into DIR"
    assert (sync in caught.value.fix, (hint or "") in caught.value.fix) == (hint is not None, True)
    # That a build lacks torch is a failure of building, and none of running.
    assert as_json(caught.value)["known"] == []
    monkeypatch.setenv("PYTHONPATH", "/opt/Megatron-LM")
    with pytest.raises(CertificationCannotRunError) as caught:
        world.certify(place=place, **({} if place == "sqsh" else {"image": None}))
    assert ("PYTHONPATH is set" in caught.value.fix) == (hint is not None)


def test_run_that_had_no_space_is_not_gone_on_with(world):
    """Its cases failed for lack of space, which is no finding about them."""
    world.status, world.output = 1 << 7, ["OSError: [Errno 28] No space left on device"]
    with pytest.raises(MachineError, match="is full"):
        world.certify()
    world.status, world.output = 0, []
    assert world.certify(resume=True).ran
    assert "--resume" not in world.calls[-1]["arguments"]


def test_runner_without_results_is_no_success(world):
    """It exits 0, as NeMo-Run's experiment does after a failed job."""
    world.spoil = lambda results: results.unlink()
    with pytest.raises(ResultsRefusedError) as caught:
        world.certify()
    assert caught.value.reason == "missing"
    assert world.certificates() == []
    # Of cases that failed there are results.
    world.spoil, world.status = lambda results: None, 1
    assert world.certify(gpus=(1, 3), isolation="process").ran
    assert world.calls[-1]["arguments"] == ("--gpus", "1,3", "--isolation", "process")


# ---- an interrupted run


@pytest.fixture
def interrupted(world):
    world.status = 130
    with pytest.raises(InterruptedByUserError) as caught:
        world.certify(only=(TP2,))
    assert "interrupted" in caught.value.what
    world.status = 0
    return world


def test_interrupted_run_goes_on_with_its_plan(interrupted):
    done = interrupted.certify(only=(TP2,), resume=True)
    first, second = interrupted.calls
    assert (first["arguments"], second["arguments"]) == ((), ("--resume",))
    assert second["plan"] == first["plan"]
    assert done.statement.predicate.nonce == first["plan"]["nonce"]


@pytest.mark.parametrize(
    ("before", "now", "fix"),
    [
        ("process", None, "Resume with --isolation process; or leave --resume out"),
        ("live", "process", "Resume with --isolation live, or without --isolation; or leave --resume out"),
    ],
)
def test_interrupted_run_of_another_isolation_does_not_go_on(interrupted, before, now, fix):
    (plan,) = (interrupted.project / "out").rglob("plan.json")
    written = f'{{"type": "run", "isolation": "{before}"}}\n{{"type": "case"}}\n'
    (plan.parent / "results/results.jsonl").write_text(written)
    with pytest.raises(UsageError, match=f"had --isolation {before}, not {now or 'live'}") as caught:
        interrupted.certify(only=(TP2,), resume=True, isolation=now)
    assert fix in caught.value.fix
    assert len(interrupted.calls) == 1
    assert (plan.parent / "results/results.jsonl").read_text() == written
    interrupted.certify(only=(TP2,), resume=True, isolation=None if before == "live" else before)
    assert interrupted.calls[-1]["arguments"][-1] == "--resume"


def test_run_of_another_plan_does_not_go_on(interrupted):
    (plan,) = (interrupted.project / "out").rglob("plan.json")
    text = plan.read_text()
    assert text.count('"steps": 5') == 2
    plan.write_text(text.replace('"steps": 5', '"steps": 4'))
    with pytest.raises(ResultsRefusedError, match="of another plan") as caught:
        interrupted.certify(only=(TP2,), resume=True)
    assert caught.value.reason == "plan"
    for text in ("{", "[]", "[" * 99999):
        plan.write_text(text)
        (plan.parent / "results/results.jsonl").write_text(f'{{"type": "run"}}\n{"[" * 99999}\n')
        with pytest.raises(ResultsRefusedError):
            interrupted.certify(only=(TP2,), resume=True)


def test_without_an_interrupted_run_all_cases_start(world):
    for options in ({"resume": True}, {"fresh": True, "resume": True}):
        assert world.certify(**options).ran
        assert world.calls[-1]["arguments"] == ()
    assert any("all cases start again" in note for note in world.reporter.lines)
    first, second = world.calls
    assert second["plan"]["nonce"] != first["plan"]["nonce"]


def test_what_an_interrupted_run_left_is_not_removed_in_silence(interrupted):
    (plan,) = (interrupted.project / "out").rglob("plan.json")
    (plan.parent / "results/results.jsonl").write_text('{"type": "run"}\n{"type": "case"}\n{"ty')
    interrupted.certify(only=(TP2,))
    assert any("--resume would have continued it" in note for note in interrupted.reporter.lines)
    first, second = interrupted.calls
    assert second["arguments"] == ()
    assert second["plan"]["nonce"] != first["plan"]["nonce"]


def test_interrupted_command_shows_the_command_that_resumes(world, answer):
    world.status = 130
    words = ["--only", TP2, "--repeat", "2", "--only", "gpt-fp32-dp2", "--fresh", "--out-dir", "out"]
    status, error = answer(*words)
    assert (status, error["kind"]) == (130, "InterruptedByUserError")
    again = shlex.split(error["fix"].partition("envbuild ")[2])
    target = ["--stack", "mcore", "--target", "cpu", "--base", "debian12"]
    assert set(again) == {"certify", *target, *words, "--json", "--resume"}
    assert again.count("--only") == 2
    world.status = 0
    assert run(again) == 0
    assert world.calls[1]["arguments"] == ("--resume",)
    assert world.calls[1]["plan"] == world.calls[0]["plan"]


# ---- logs


@pytest.mark.parametrize("scale", [{}, {TP2: 1.5}])
def test_reports_name_the_logs_of_each_case(world, scale):
    """Whether it passed or not; of a page that is written again too."""

    def logs(results):
        for name in ("cases/gpt-fp32-tp2/rank0.log", "repeat-2/cases/gpt-fp32-tp2/rank1.log"):
            (results.parent / name).parent.mkdir(parents=True)
            (results.parent / name).write_text("words")

    world.spoil, world.faults = logs, {"scale": scale}
    with pytest.raises(CertificationFailedError) if scale else contextlib.nullcontext():
        world.certify(only=(TP2,), repeats=2)
    (report,) = (world.project / "out").rglob("junit.xml")
    run_dir = report.parent / "run/results"
    outputs = [case.findtext("system-out", "") for case in ElementTree.parse(report).iter("testcase")]
    assert not any("rank" in text for text in outputs if "baseline:" not in text)
    assert all(f"log: {run_dir}/cases/gpt-fp32-tp2/rank0.log" in text for text in outputs if "baseline:" in text)
    assert str(run_dir / "repeat-2/cases/gpt-fp32-tp2/rank1.log") in report.with_name("report.html").read_text()


# ---- the machine


def cannot_open(world, place, **machine):
    with pytest.raises(CertificationCannotRunError) as caught:
        open_executor(make_job(world.request(place=place), world.store), MachineOptions(**machine), world.reporter)
    return caught.value


@pytest.mark.parametrize("place", ["oci", "sqsh"])
def test_machine_without_a_driver_is_refused_before_anything_starts(shared_world, tmp_path, monkeypatch, place):
    monkeypatch.setattr("envbuild.launch.bwrap.find_driver", lambda: find_driver("", tmp_path))
    monkeypatch.setattr(CertifyJob, "on_gpus", True)
    assert cannot_open(shared_world, place, runtime="unpack").reason == "no-driver"


@pytest.mark.parametrize("place", ["docker", "sqsh"])
def test_machine_without_a_runtime_is_refused(shared_world, monkeypatch, place):
    def missing(*arguments, **options):
        raise MachineError("there is none", fix="Install it.")

    monkeypatch.setattr("envbuild.launch.docker.open_engine", missing)
    monkeypatch.setattr("envbuild.launch.bwrap.probe", missing)
    error = cannot_open(shared_world, place)
    assert (error.what, error.reason, error.fix) == ("there is none", "no-runtime", "Install it.")


@pytest.mark.parametrize("host", ["unix://{}/none", "ftp://x"])
def test_missing_daemon_error_names_the_other_places(shared_world, tmp_path, monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host.format(tmp_path))
    assert cannot_open(shared_world, "docker").fix.endswith("Without a daemon: --in sqsh or --in oci.")


def test_a_clusters_floor_is_in_the_plan(world):
    envs = world.project / "envs"
    (envs / "clusters").mkdir(parents=True)
    (envs / "clusters/lab.toml").write_text('summary = "lab"\n[floors.cpu.node]\nall_reduce = 3\n')
    (envs / "clusters/other.toml").write_text('summary = "other"\n[floors.h200.node]\nall_reduce = 300\n')
    (envs / "matrices").mkdir(exist_ok=True)
    quick = (data_root() / "envs/matrices/certify-quick.toml").read_text()
    (envs / "matrices/swept.toml").write_text(f'{quick}\n[bandwidth]\nsizes_bytes = [1024]\ndevices = ["cpu"]\n')
    world.selection = replace(world.selection, catalog=Catalog.open(world.project))

    def job(cluster: str | None, matrix: str = "swept"):
        return make_job(world.request(cluster=cluster, matrix_name=matrix), world.store)

    assert job(None).plan["bandwidth"]["floor_gigabytes_per_second"] is None
    assert job("lab").plan["bandwidth"]["node_floors"] == {"all_reduce": 3}
    (envs / "matrices/floored.toml").write_text(
        f'{quick}\n[bandwidth]\nsizes_bytes = [1024]\ndevices = ["cpu"]\nfloor_gigabytes_per_second = 5\n'
    )
    assert job("lab", "floored").plan["bandwidth"]["floor_gigabytes_per_second"] == 5
    assert job("lab").key != job(None).key
    assert " --on lab " in judge_command(job("lab"), "DIR")
    with pytest.raises(ConfigurationError) as caught:
        job("other")
    assert caught.value.what == "cluster other has no bandwidth floor for target cpu"
    assert "has no [floors.cpu.node]" in caught.value.why
    # Nothing would be held to it.
    with pytest.raises(UsageError, match="--on lab has no effect"):
        job("lab", "certify-quick")
