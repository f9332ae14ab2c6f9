"""Certification here, by a command that reaches the hardware, and by a plan that waits."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from helpers.certify_world import World
from helpers.fake_runner import results_of, write
from unit.certify.conftest import make_world

from envbuild.catalog.fields import Device
from envbuild.certify import certify
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import Signer, load_signer
from envbuild.core.digests import sha256_file
from envbuild.core.errors import (
    CertificationCannotRunError,
    CertificationFailedError,
    MachineError,
    ResultsRefusedError,
    UsageError,
)
from envbuild.nightly import plan
from envbuild.nightly.hardware import SPENT, HardwareAccess, certify_somewhere, command_for, parse_on, parse_run_with
from envbuild.nightly.models import NightCluster, NightRequest

TESTS = Path(__file__).parents[2]
RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.fake_runner import results_of, write
from envbuild.core.digests import sha256_file
plan, results = Path(sys.argv[1]), Path(sys.argv[2])
facts = {{"smoke_digest": sha256_file(plan / "smoke.pyz"), **{facts!r}}}
write(results / "results.jsonl", results_of((plan / "plan.json").read_bytes(), **facts))
(results.parent / "called").open("a").write("x")
sys.exit({status})
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path / "project", monkeypatch)


@pytest.fixture
def no_gpus(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CertificationCannotRunError("no driver", why="There is no GPU here.", reason="no-driver")

    monkeypatch.setattr(certify, "open_executor", refuse)


def runner(folder: Path, *, status: int = 0, **facts: object) -> HardwareAccess:
    script = folder / "runner.py"
    script.write_text(RUNNER.format(tests=str(TESTS), facts=facts, status=status))
    return HardwareAccess(command=shlex.join([sys.executable, str(script), "{plan}", "{results}"]))


def bring_results(plan: Path, **facts: object) -> None:
    facts = {"smoke_digest": sha256_file(plan / "smoke.pyz"), **facts}
    write(plan / "results/results.jsonl", results_of((plan / "plan.json").read_bytes(), **facts))


def test_what_can_run_here_runs_here(world: World) -> None:
    certified = certify_somewhere(world.request(), HardwareAccess(), world.context)
    assert certified.done is not None
    assert certified.done.ran
    assert certify_somewhere(world.request(), HardwareAccess(), world.context).done.written is False


def test_the_plan_of_a_night_has_what_the_night_does(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that is there may not be signed, or by another key."""
    monkeypatch.setattr(plan, "_why_locked", lambda *_: "")
    signer = load_signer(str(make_keys(tmp_path, "lab", None).private), None)

    def to_do(signer: Signer | None) -> bool:
        request = NightRequest(
            selections=(world.selection,), project=world.project, out_dir=world.project / "out", signer=signer
        )
        (step,) = (step for step in plan.plan_night(request, None, world.context) if step.step == "certify")
        return step.to_do

    certified = world.request(only=())
    assert to_do(None)
    certify_somewhere(certified, HardwareAccess(), world.context)
    assert not to_do(None)
    assert to_do(signer)
    certify_somewhere(certified, HardwareAccess(signer=signer), world.context)
    assert not to_do(signer)


def test_a_second_attempt_has_new_processes_for_every_case(world: World) -> None:
    certify_somewhere(world.request(), HardwareAccess(), world.context, again=True)
    assert "--isolation" in world.calls[0]["arguments"]


@pytest.mark.usefixtures("no_gpus")
def test_without_the_hardware_a_plan_waits_and_its_results_are_picked_up(world: World) -> None:
    first = certify_somewhere(world.request(), HardwareAccess(), world.context)
    assert first.done is None
    assert first.waiting is not None
    plan = (first.waiting / "plan.json").read_bytes()
    # The same plan waits in the next night: somebody may be running it.
    assert certify_somewhere(world.request(), HardwareAccess(), world.context).waiting == first.waiting
    assert (first.waiting / "plan.json").read_bytes() == plan
    bring_results(first.waiting)
    certified = certify_somewhere(world.request(), HardwareAccess(), world.context)
    assert certified.done is not None
    assert certified.done.statement.predicate.runtime == "by hand"
    assert certify_somewhere(world.request(), HardwareAccess(), world.context).done is not None


@pytest.mark.usefixtures("no_gpus")
def test_results_that_do_not_count_are_refused_once_and_another_plan_waits(world: World) -> None:
    first = certify_somewhere(world.request(), HardwareAccess(), world.context).waiting
    assert first is not None
    bring_results(first)
    results = first / "results/results.jsonl"
    results.write_bytes(results.read_bytes()[:-30])
    with pytest.raises(ResultsRefusedError):
        certify_somewhere(world.request(), HardwareAccess(), world.context)
    assert (first / SPENT).is_file()
    second = certify_somewhere(world.request(), HardwareAccess(), world.context).waiting
    assert second is not None
    assert second != first
    assert (second / "plan.json").read_bytes() != (first / "plan.json").read_bytes()


@pytest.mark.usefixtures("no_gpus")
def test_a_plan_that_a_kill_left_half_written_is_written_again(world: World) -> None:
    first = certify_somewhere(world.request(), HardwareAccess(), world.context).waiting
    assert first is not None
    (first / "plan.json").unlink()
    assert certify_somewhere(world.request(), HardwareAccess(), world.context).waiting == first
    assert (first / "plan.json").is_file()


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("status", [0, 1])
def test_a_command_runs_the_plan_and_its_status_is_no_verdict(world: World, tmp_path: Path, status: int) -> None:
    access = runner(tmp_path, status=status)
    certified = certify_somewhere(world.request(), access, world.context)
    assert certified.done is not None
    # A certificate that stands is not measured again.
    assert certify_somewhere(world.request(), access, world.context).done is not None
    (called,) = (world.project / "out/plans").rglob("called")
    assert called.read_text() == "x"


@pytest.mark.usefixtures("no_gpus")
def test_a_command_whose_cases_fail_gets_a_new_plan_for_the_second_attempt(world: World, tmp_path: Path) -> None:
    access = runner(tmp_path, scale={"gpt-fp32-tp2": 1.01})
    plans = set()
    for number in (1, 2):
        with pytest.raises(CertificationFailedError):
            certify_somewhere(world.request(), access, world.context, again=number > 1)
        plans |= {path.read_bytes() for path in (world.project / "out/plans").rglob("plan.json")}
        assert len(plans) == number


@pytest.mark.usefixtures("no_gpus")
def test_a_command_that_brings_nothing_is_a_fault_of_the_machine(world: World) -> None:
    with pytest.raises(MachineError, match="brought no results") as caught:
        certify_somewhere(world.request(), HardwareAccess(command="false {plan}"), world.context)
    assert "status 1" in caught.value.why
    assert caught.value.log is not None


def test_another_reason_than_hardware_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CertificationCannotRunError("no runtime", reason="no-runtime")

    monkeypatch.setattr(certify, "open_executor", refuse)
    with pytest.raises(CertificationCannotRunError):
        certify_somewhere(world.request(), HardwareAccess(), world.context)
    assert not (world.project / "out/plans").exists()


def test_commands_by_target() -> None:
    commands = parse_run_with(("sbatch {plan}", "h200=ssh node {plan}"), ("h200", "b200", "cpu"))
    assert command_for(commands, "h200", Device.CUDA) == "ssh node {plan}"
    assert command_for(commands, "b200", Device.CUDA) == "sbatch {plan}"
    assert command_for(commands, "cpu", Device.CPU) == ""
    # A word with = that is no target is part of the command.
    assert parse_run_with(("env A=1 run {plan}",), ("cpu",)) == {"": "env A=1 run {plan}"}
    for wrong in (("run it",), ("run '{plan}",), ("a {plan}", "b {plan}")):
        with pytest.raises(UsageError):
            parse_run_with(wrong, ("cpu",))


def test_clusters_by_target() -> None:
    assert parse_on(("dgx", "cpu=lab"), ("h200", "cpu"), 2) == {
        "": NightCluster(name="dgx", nodes=2),
        "cpu": NightCluster(name="lab", nodes=2),
    }
    for wrong in (("dgx", "lab"), ("h100=dgx",)):
        with pytest.raises(UsageError, match="is not a cluster of a target"):
            parse_on(wrong, ("h200", "cpu"), 1)
