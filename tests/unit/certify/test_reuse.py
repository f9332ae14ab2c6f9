"""A case that passed is not run again while nothing that decides it changed; what failed last is."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.certify_world import edit
from helpers.fake_runner import GPU

from envbuild.certify.judge.judge import JUDGE_VERSION
from envbuild.certify.run import durations, reuse
from envbuild.certify.run.job import make_job
from envbuild.certify.run.reuse import MachineKey
from envbuild.core.errors import CertificationFailedError
from envbuild.core.files import remove_tree
from envbuild.launch.gpus import Gpu
from envbuild.store import entry_index
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.results import RunLine

TP2, PP2, BASELINE = (f"gpt-fp32-{name}" for name in ("tp2", "pp2", "baseline"))


def ran(call):
    return [case["id"] for case in call["plan"]["cases"]]


def reused(done):
    return [case.id for case in done.statement.predicate.cases if case.reused]


def test_cases_that_passed_in_a_part_are_not_run_again_in_the_whole(world):
    world.certify(only=(TP2,))
    done = world.certify(only=())
    first, second = map(ran, (world.calls[0], world.calls[1]))
    assert first == [BASELINE, TP2]
    # Others need the baseline's weights.
    assert BASELINE in second
    assert TP2 not in second
    assert set(first) | set(second) == {case.id for case in done.statement.predicate.cases}
    assert (done.cases_run, reused(done)) == (len(second), [TP2])
    (case,) = (case for case in done.statement.predicate.cases if case.reused)
    assert case.reused.from_ == "2026-01-01T00:01:00Z"
    assert case.steps[0].loss == 6.375
    assert f"  reused    {TP2}: passed on 2026-01-01T00:01:00Z" in world.reporter.lines
    assert done.statement.predicate.nonce == world.calls[1]["plan"]["nonce"]


def test_baseline_is_not_run_where_nothing_needs_it(world):
    world.certify(only=(TP2, PP2))
    done = world.certify(only=(PP2,))
    assert (len(world.calls), done.ran, reused(done)) == (1, False, [BASELINE, PP2])
    assert done.statement.predicate.nonce == world.calls[0]["plan"]["nonce"]
    assert world.certify(only=(PP2,)).certificate == done.certificate


def test_command_reports_whether_it_wrote_a_certificate(world, command, answer, capsys):
    words = ("--only", PP2)
    world.certify(only=(TP2, PP2))
    assert command(*words) == 0
    text = capsys.readouterr().out
    assert text.startswith("certified: 2 cases agree with their baseline")
    assert "a part of matrix certify-quick, which publishing wants whole" in text
    assert "all of them passed in an earlier run" in text
    assert len(world.calls) == 1
    assert command(*words) == 0
    assert capsys.readouterr().out.startswith("nothing to do: already certified: 2 cases")
    _, found = answer(*words)
    assert (found["ran"], found["written"]) == (False, False)
    Path(found["certificate"]).unlink()
    _, found = answer(*words)
    assert (found["ran"], found["written"]) == (False, True)
    assert command() == 0
    text = capsys.readouterr().out
    assert text.startswith("certified: 15 cases")
    assert "2 of them passed in an earlier run" in text


def test_fresh_repeated_and_other_runs_reuse_nothing(world):
    world.certify()
    for options in ({"fresh": True}, {"repeats": 2}, {"runtime": "unpack"}):
        done = world.certify(**options)
        assert (done.cases_run, reused(done)) == (2, [])
        if "repeats" in options:
            found = [(case.id, case.repeat) for case in done.statement.predicate.cases]
            assert found == [(BASELINE, 1), (BASELINE, 2), (TP2, 1), (TP2, 2)]


@pytest.mark.parametrize("passed_before", [True, False])
def test_case_that_failed_last_is_run_again_and_those_that_passed_too(world, passed_before):
    """Where one rank was wrong, the machine may have been."""
    if passed_before:
        world.certify()
    world.faults = {"scale": {TP2: 1.1}}
    with pytest.raises(CertificationFailedError):
        world.certify(fresh=passed_before)
    world.faults = {}
    done = world.certify()
    assert (done.cases_run, reused(done)) == (2, [])


def test_verdict_that_was_measured_elsewhere_than_it_seemed_is_not_kept(world):
    """GPUs that only the runner saw: the next run would not find them."""
    world.faults = {"gpus": [{"name": "NVIDIA H200"}]}
    world.certify(only=(TP2,))
    world.faults = {}
    assert reused(world.certify()) == []


# What may stand where a record was.
DAMAGED = ["", "{", "[]", "{}", "7", "[" * 99999, "\x80", None]
HUGE = f'{{"seconds": 1{"0" * 400}}}'


def damage(world, kind, name, text, *, sealed):
    """Put a text, or nothing, where the records of a kind were; ``sealed``: as if it had been written so."""
    for entry in (world.project / "cache" / kind).iterdir():
        (entry / name).unlink(missing_ok=True)
        if text is not None:
            (entry / name).write_text(text, encoding="latin-1")
        if sealed:
            entry_index.write_index(entry)


def test_damaged_verdict_is_not_used(world):
    done = world.certify()
    for name, text, sealed in (
        *((reuse.FILE, text, True) for text in DAMAGED),
        (reuse.FILE, "{", False),
        (reuse.FILE, None, False),
        *((entry_index.ENTRY_INDEX_FILE, text, False) for text in ("", "[]", None)),
    ):
        remove_tree(done.certificate.parent)
        damage(world, "verdicts", name, text, sealed=sealed)
        done = world.certify()
        assert (done.cases_run, reused(done)) == (2, []), text


def change_verdicts(world, *place, value, sealed=True):
    """Change what was kept of TP2; ``sealed``: as somebody does who knows of seals."""
    for file in (world.project / "cache" / "verdicts").rglob(reuse.FILE):
        content = json.loads(file.read_text())
        if content["case"]["id"] != TP2:
            continue
        target = content
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
        file.chmod(0o644)
        file.write_text(json.dumps(content))
        if sealed:
            entry_index.write_index(file.parent)


def test_verdict_that_was_changed_is_not_used_whatever_its_seal(world):
    done = world.certify()
    for *place, value in (
        ("case", "steps", 0, "loss", 1.0),
        ("case", "largest_relative_difference", "loss", 0.5),
        ("case", "largest_relative_difference", "weights", 0.5),
        ("measured", "image", "file_digest", f"sha256:{'0' * 64}"),
    ):
        for sealed in (True, False):
            remove_tree(done.certificate.parent)
            change_verdicts(world, *place, value=value, sealed=sealed)
            done = world.certify()
            assert ran(world.calls[-1]) == [BASELINE, TP2]
            assert TP2 not in reused(done), place
    remove_tree(done.certificate.parent)
    assert reused(world.certify()) == [BASELINE, TP2]


def test_verdict_from_the_future_is_not_used(world):
    """A clock was ahead; neither the certificate nor the verdicts that it was made of count."""
    world.certify()
    change_verdicts(world, "measured", "finished_at", value="9999-12-31T23:59:59Z")
    [certificate] = world.certificates()
    edit(certificate, lambda made: made["predicate"].update(issued_at="9999-12-31T23:59:59Z"), reseal=True)
    done = world.certify()
    assert done.not_counted.startswith("it was issued at 9999-12-31T23:59:59Z, after the moment of verification")
    assert (len(world.calls), TP2 in reused(done), done.written) == (2, False, True)
    assert world.certify().written is False


def test_reused_case_is_compared_with_the_new_baseline(world):
    """Its baseline was measured again, and computes something else now."""
    world.certify(only=(TP2,))
    world.faults = {"scale": {case.id: 1.001 for case in make_job(world.request(only=()), world.store).cases}}
    with pytest.raises(CertificationFailedError) as caught:
        world.certify(only=())
    assert f"{TP2}: parity-loss: step 1: loss expected" in caught.value.why
    assert PP2 not in caught.value.why


# ---- what decides a verdict

HERE = MachineKey(runtime="loop", gpus=("NVIDIA H200",), drivers=("580",), variables=(("NCCL_ALGO", "Ring"),))


@pytest.fixture(scope="module")
def job(shared_world):
    return make_job(shared_world.request(only=()), shared_world.store)


@pytest.mark.parametrize(
    "change",
    [
        {"runtime": "squashfuse"},
        {"gpus": ("NVIDIA B200",)},
        {"gpus": ("NVIDIA B200", "NVIDIA H200")},
        {"drivers": ("575",)},
        {"variables": ()},
        {"variables": (("NCCL_ALGO", "Tree"),)},
    ],
)
def test_verdict_is_one_of_a_machine(job, change):
    case = job.cases[4]
    assert reuse.key_of(job, case, HERE) == reuse.key_of(job, case, replace(HERE))
    assert reuse.key_of(job, case, replace(HERE, **change)) != reuse.key_of(job, case, HERE)


def changed(job, **changes):
    plan = json.loads(json.dumps(job.plan))
    for place, value in changes.items():
        target = plan
        *path, last = place.split("__")
        for word in path:
            target = target[int(word) if word.isdecimal() else word]
        target[last] = value
    return replace(job, plan=plan)


@pytest.mark.parametrize(
    "change",
    [
        {"subject__oci_digest": "sha256:other"},
        {"subject__lock_digest": "sha256:other"},
        {"subject__in": "oci"},
        {"device": "cuda"},
        {"gpu": {"sm": ["90"]}},
        {"cases__4__training": {}},
        {"cases__4__settings": {}},
        {"cases__0__training": {}},
        {"models__gpt__num_layers": 8},
    ],
)
def test_verdict_is_one_of_an_image_and_a_case(job, change):
    case = job.cases[4]
    assert reuse.key_of(changed(job, **change), case, HERE) != reuse.key_of(job, case, HERE)


@pytest.mark.parametrize("change", [{"cases__2__training": {}}, {"cases__4__estimated_seconds": 5.0}, {"nonce": "n"}])
def test_verdict_does_not_depend_on_other_cases_or_estimates(job, change):
    assert reuse.key_of(changed(job, **change), job.cases[4], HERE) == reuse.key_of(job, job.cases[4], HERE)


def test_verdict_is_one_of_a_runner_a_judge_and_a_tolerance(job, monkeypatch):
    case = job.cases[4]
    before = reuse.key_of(job, case, HERE)
    assert reuse.key_of(replace(job, smoke_digest="sha256:other"), case, HERE) != before
    band = job.matrix.tolerance["fp32"].model_copy(update={"loss_relative": 1e-3})
    wider = job.matrix.model_copy(update={"tolerance": {case.precision: band}})
    assert reuse.key_of(replace(job, matrix=wider), case, HERE) != before
    monkeypatch.setattr(reuse, "JUDGE_VERSION", JUDGE_VERSION + 1)
    assert reuse.key_of(job, case, HERE) != before


def test_machine_is_the_same_from_outside_and_from_its_results(world):
    world.faults = {"gpus": [{}, {"index": 1, "uuid": "GPU-1"}], "variables": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "I"}}
    found = []
    world.spoil = lambda path: found.append(json.loads(path.read_text().splitlines()[0]))
    world.certify()
    (run,) = found
    gpus = [Gpu(index=str(i), name=GPU["name"], driver=GPU["driver"]) for i in range(2)]
    here = MachineKey.here("loop", gpus, {"NCCL_ALGO": "Ring", "PATH": "/bin"})
    assert here == MachineKey.of("loop", SimpleNamespace(run=read_object(RunLine, run, "run")))
    assert here.variables == (("NCCL_ALGO", "Ring"),)


# ---- environments that are in no image


def test_environment_that_is_in_no_image_is_run_every_time(world):
    """A certificate about it is about its lock; whether another has that lock, only a run can say."""
    for _ in range(2):
        done = world.certify(place="venv", image=None)
        assert (done.ran, reused(done)) == (True, [])
    assert list(done.statement.digests()) == ["mcore-debian12-cpu.lock"]
    assert done.statement.digests()["mcore-debian12-cpu.lock"] == world.lock.lock.digest
    assert not (world.project / "cache" / "verdicts").exists()


# ---- durations


def estimates(world):
    return {case["estimated_seconds"] for case in make_job(world.request(), world.store).plan["cases"]}


def test_durations_go_into_the_next_plan_and_into_no_key(world):
    first = make_job(world.request(), world.store)
    assert estimates(world) == {None}
    world.certify()
    second = make_job(world.request(), world.store)
    assert {case["estimated_seconds"] for case in second.plan["cases"]} == {1.5}
    assert (second.key, second.folder) == (first.key, first.folder)
    # Also into the plan of some cases, where others are reused.
    world.certify(only=())
    known = {case["id"]: case["estimated_seconds"] for case in world.calls[1]["plan"]["cases"]}
    assert (known[BASELINE], known[PP2], TP2 in known) == (1.5, None, False)
    for text in (*DAMAGED, '{"seconds": "x"}', '{"seconds": NaN}', '{"seconds": -1}', HUGE):
        damage(world, "durations", durations.FILE, text, sealed=True)
        assert estimates(world) == {None}, text
    world.certify(fresh=True)
    assert estimates(world) == {1.5}
    damage(world, "durations", durations.FILE, "{", sealed=False)
    assert estimates(world) == {None}


def test_duration_that_is_news_takes_the_place_of_the_old(world, monkeypatch):
    job = make_job(world.request(), world.store)
    world.certify()
    verdicts = []
    record = durations.record
    monkeypatch.setattr(durations, "record", lambda plan, found, store: verdicts.extend(found))
    world.certify(fresh=True)
    for seconds, known in ((1.7, 1.5), (3.0, 3.0)):
        record(job.plan, [verdict.model_copy(update={"seconds": seconds}) for verdict in verdicts], world.store)
        assert durations.estimates(job.plan, world.store)[TP2] == known
    failed = [verdict.model_copy(update={"passed": False, "seconds": 90.0}) for verdict in verdicts]
    record(job.plan, failed, world.store)
    assert durations.estimates(job.plan, world.store)[TP2] == 3.0
