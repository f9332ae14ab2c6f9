"""A plan for another machine: what is written, and which results are judged when they come back."""

import json
import os
import re
import shutil

import pytest
from helpers.fake_runner import results_of, write

from envbuild.certify.offline import ExplicitOptions, judge_folder, write_plan
from envbuild.certify.report.files import end_of
from envbuild.cli.main import run
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CertificationFailedError, ConfigurationError, ResultsRefusedError, UsageError
from envbuild.core.files import remove_tree

TP2 = "gpt-fp32-tp2"
OTHER = "sha256:" + "0" * 64


@pytest.fixture
def folder(world, tmp_path):
    """A plan's folder, written."""
    write_plan(world.request(), tmp_path / "plan", world.store)
    return tmp_path / "plan"


@pytest.fixture(scope="module")
def one_folder(shared_world, tmp_path_factory):
    """The folder of a plan of the shared world, with its results."""
    folder = tmp_path_factory.mktemp("offline") / "plan"
    write_plan(shared_world.request(), folder, shared_world.store)
    run_there(folder)
    return folder


@pytest.fixture
def brought(one_folder, tmp_path):
    """A copy of it, as it was brought back."""
    return shutil.copytree(one_folder, tmp_path / "brought")


def run_there(folder, place="results", **faults):
    """What the runner does where the folder was brought to."""
    plan = (folder / "plan.json").read_bytes()
    facts = {"smoke_digest": sha256_file(folder / "smoke.pyz"), **faults}
    write(folder / place / "results.jsonl", results_of(plan, **facts))


def judge(world, folder, **options):
    return judge_folder(world.request(**options), folder, world.context, None, ExplicitOptions())


def refused(world, folder, **options):
    with pytest.raises(ResultsRefusedError) as caught:
        judge(world, folder, **options)
    assert caught.value.exit_code == 13
    assert world.certificates() == []
    return caught.value.reason, caught.value.why


def edit(folder, *place, value):
    plan = json.loads((folder / "plan.json").read_text())
    target = plan
    for word in place[:-1]:
        target = target[word]
    target[place[-1]] = value
    (folder / "plan.json").write_text(json.dumps(plan))


def test_folder_has_all_that_another_machine_needs(world, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "plan.json", "results", "smoke.pyz"]
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["subject"]["sqsh_digest"] == world.image.record.sqsh_digest
    text = (folder / "README.md").read_text()
    assert "enroot start" in text
    # The .sqsh is not mounted in the folder that is brought back: the mount would leave a file there.
    assert "--image /mnt/image.sqsh" in text
    assert ":/envbuild/image.sqsh" not in text
    assert '--container-mounts="$PWD:/envbuild,$SQSH:/mnt/image.sqsh"' in text
    assert world.image.record.python in text
    assert world.image.record.sqsh_digest in text
    assert "results/results.jsonl" in text
    assert world.calls == []


def test_readme_and_key_are_those_of_the_place(shared_world, tmp_path):
    keys = set()
    for place, message in (
        ("docker", "docker run --rm --network none"),
        ("oci", "docker run"),
        ("venv", "python smoke.pyz run"),
        ("sqsh", "enroot start"),
    ):
        image = None if place == "venv" else shared_world.image
        folder = tmp_path / place
        keys.add(write_plan(shared_world.request(place=place, image=image), folder, shared_world.store).key)
        assert message in (folder / "README.md").read_text()
        if place in ("docker", "oci"):
            assert sha256_file(folder / "manifest.json") == shared_world.image.record.oci_digest
    assert len(keys) == 4


def test_plan_needs_of_the_image_its_digests_alone(world, tmp_path):
    (world.image.path / "image.sqsh").unlink()
    write_plan(world.request(), tmp_path / "plan", world.store)
    assert (tmp_path / "plan" / "plan.json").is_file()


def test_folder_that_has_something_is_refused(shared_world, brought):
    with pytest.raises(ConfigurationError, match="is not empty"):
        write_plan(shared_world.request(), brought, shared_world.store)


@pytest.mark.parametrize("place", ["results", "."])
def test_results_that_were_brought_back_are_certified(world, folder, place):
    run_there(folder, place)
    done = judge(world, folder)
    predicate = done.statement.predicate
    assert predicate.runtime == "by hand"
    assert predicate.nonce == json.loads((folder / "plan.json").read_text())["nonce"]
    assert predicate.plan_digest == sha256_file(folder / "plan.json")
    assert done.reports.page.is_file()
    assert judge(world, folder).certificate == done.certificate
    assert world.certify().ran is False


def test_results_are_judged_where_there_is_no_image(world, folder):
    run_there(folder)
    remove_tree(world.image.path)
    done = judge(world, folder, image=None)
    record = world.image.record
    assert list(done.statement.digests().values()) == [record.oci_digest, record.sqsh_digest]


def test_repeats_and_place_are_the_plans(world, tmp_path):
    write_plan(world.request(place="here", image=None, repeats=2), tmp_path / "plan", world.store)
    run_there(tmp_path / "plan")
    done = judge(world, tmp_path / "plan")
    assert {case.repeat for case in done.statement.predicate.cases} == {1, 2}
    assert done.statement.predicate.launcher == "here"


# ---- the plan is the one that is made here


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("subject", "lock_digest"), OTHER, f'subject.lock_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "sqsh_digest"), OTHER, f'subject.sqsh_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "oci_digest"), OTHER, f'subject.oci_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "sqsh_digest"), "sha256:x", "its repeats or its subject is invalid"),
        (("subject", "launcher"), "moon", "its repeats or its subject is invalid"),
        (("subject", "form"), "none", "its repeats or its subject is invalid"),
        (("nonce",), "x", 'plan.nonce: found "x"'),
        (("nonce",), ["ab" * 16], "is not a plan"),
        (("repeats",), 0, "plan.repeats: found 0"),
        (("repeats",), 10**9, "its repeats or its subject is invalid"),
        (("repeats",), True, "plan.repeats: found true"),
        (("subject", "target"), "h200", 'subject.target: "h200" in the folder, "cpu" here'),
        (("cases", 1, "training", "steps"), 1, "cases[1].training.steps: 1 in the folder, 5 here"),
        (("cases", 1, "settings", "batch_p2p_comm"), False, "batch_p2p_comm: false in the folder, true here"),
        (("expected_versions",), {}, "expected_versions."),
        (("device",), "cuda", "plan.gpu: found null with device 'cuda'"),
        (("approved",), True, "plan: unknown key 'approved'"),
    ],
)
def test_plan_that_was_changed_is_refused(shared_world, brought, place, value, message):
    edit(brought, *place, value=value)
    reason, why = refused(shared_world, brought)
    assert reason == "plan"
    assert message in why


@pytest.mark.parametrize("value", ["sha256:x", "x\x1b[2J", 7])
def test_plan_with_an_invalid_digest_is_refused_without_an_image(shared_world, brought, value):
    edit(brought, "subject", "oci_digest", value=value)
    reason, why = refused(shared_world, brought, image=None)
    assert (reason, "is not a plan" in why) == ("plan", True)


def test_plan_that_has_a_key_twice_is_refused(shared_world, brought):
    """The runner may have taken the other one."""
    text = (brought / "plan.json").read_text()
    (brought / "plan.json").write_text(text.replace('"repeats": 1', '"repeats": 3, "repeats": 1', 1))
    reason, why = refused(shared_world, brought)
    assert (reason, "occurs twice" in why) == ("plan", True)


def test_plan_with_another_nonce_than_its_results_is_refused(shared_world, brought):
    edit(brought, "nonce", value="0" * 32)
    reason, why = refused(shared_world, brought)
    assert reason == "plan"
    assert "its nonce is" in why


def test_plan_of_other_cases_is_refused(shared_world, brought):
    reason, why = refused(shared_world, brought, only=())
    assert reason == "plan"
    assert "cases: " in why


@pytest.mark.parametrize("data", [None, "", "{", "[]", "{}", "[" * 99999])
def test_folder_without_a_plan_is_refused(shared_world, brought, data):
    (brought / "plan.json").unlink()
    if data is not None:
        (brought / "plan.json").write_text(data)
    assert refused(shared_world, brought)[0] == "plan"


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda plan: plan.pop("cases"), "plan.cases: missing"),
        (lambda plan: plan["cases"].append(7), "found 7; must be an object"),
    ],
)
def test_plan_whose_cases_are_none_is_refused(shared_world, brought, spoil, cause):
    """Also where the results name the digest of just these bytes."""
    plan = json.loads((brought / "plan.json").read_text())
    spoil(plan)
    (brought / "plan.json").write_text(json.dumps(plan))
    lines = (brought / "results/results.jsonl").read_text().splitlines()
    run = {**json.loads(lines[0]), "plan_digest": sha256_file(brought / "plan.json")}
    (brought / "results/results.jsonl").write_text("\n".join([json.dumps(run), *lines[1:], ""]))
    reason, why = refused(shared_world, brought)
    assert (reason, cause in why) == ("plan", True)


# ---- the results are those of the plan


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"image": "sha256:" + "0" * 64}, "image"),
        ({"smoke_digest": "sha256:" + "0" * 64}, "smoke"),
        ({"nonce": "0" * 32}, "plan"),
    ],
)
def test_results_of_another_image_or_runner_are_refused(shared_world, brought, faults, reason):
    run_there(brought, **faults)
    assert refused(shared_world, brought)[0] == reason


def spoiled(folder, change):
    """The results that were brought back, with their lines changed."""
    file = folder / "results/results.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def test_results_that_are_refused_cost_no_certificate(world, folder, tmp_path):
    run_there(folder)
    before = judge(world, folder).certificate
    content = before.read_bytes()
    write_plan(world.request(), tmp_path / "second", world.store)
    with pytest.raises(ResultsRefusedError) as caught:
        judge(world, tmp_path / "second")
    assert (caught.value.exit_code, caught.value.reason) == (13, "missing")
    assert (before.read_bytes(), world.certificates()) == (content, [before])


def test_number_of_a_line_that_was_changed_fails_its_case_and_does_not_use_up_the_nonce(world, folder):
    """The run may have been interrupted, and goes on."""
    run_there(folder)
    spoiled(folder, lambda lines: [line.replace('"loss": 6.25', '"loss": 6.26') if TP2 in line else line
                                   for line in lines])  # fmt: skip
    with pytest.raises(CertificationFailedError) as caught:
        judge(world, folder)
    assert f"{TP2}: parity-loss: step 2" in caught.value.why
    assert world.certificates() == []
    run_there(folder)
    assert judge(world, folder)


def test_nonce_is_certified_once(world, folder):
    run_there(folder)
    certificate = judge(world, folder).certificate
    remove_tree(certificate.parent)
    # The same plan, run a second time.
    run_there(folder, started_at="2025-12-31T00:00:00Z")
    reason, why = refused(world, folder)
    assert reason == "nonce"
    assert "other results were certified before" in why


def test_damaged_record_of_a_nonce_lets_nothing_pass(world, folder):
    """It was in the folder, so the nonce was used; for what is unknown."""
    run_there(folder)
    remove_tree(judge(world, folder).certificate.parent)
    (file,) = (world.project / "cache" / "nonces").rglob("judged.json")
    file.unlink()
    file.write_text("{}")
    reason, why = refused(world, folder)
    assert (reason, f"{file.parent}, is damaged" in why) == ("nonce", True)


# ---- the command line


def test_command_that_the_readme_names_judges(world, answer, tmp_path):
    _, shown = answer("--plan-out", tmp_path / "p", "--only", TP2)
    assert shown["cases"] == ["gpt-fp32-baseline", TP2]
    status, error = answer("--judge", tmp_path / "p", "--only", TP2)
    assert (status, error["reason"]) == (13, "missing")
    run_there(tmp_path / "p")
    text = (tmp_path / "p/README.md").read_text()
    words = re.search(r"^envbuild (certify .*)$", text, re.MULTILINE)[1].split()
    assert run([word if word != "DIR" else str(tmp_path / "p") for word in words]) == 0
    assert len(world.certificates()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan-out", "x", "--judge", "y"], "--judge has no effect with --plan-out"),
        (["--plan-out", "x", "--resume"], "--resume has no effect with --plan-out"),
        (["--judge", "x", "--isolation", "live"], "--isolation has no effect with --judge"),
        (["--plan-out", "x", "--key-password", "env:P"], "--key-password has no effect with --plan-out"),
        (["--key-password", "env:P"], "--key-password has no effect without a key"),
        (["--key", "off", "--key-password", "env:P"], "--key-password has no effect without a key"),
        (["--print-cases", "--plan-out", "x"], "--plan-out has no effect with --print-cases"),
        (["--print-cases", "--fresh", "--repeat", "3", "--key", "nope"], "--fresh has no effect with --print-cases"),
        (["--print-cases", "--key", "nope"], "--key has no effect with --print-cases"),
        (["--venv", "x"], "--venv has no effect with --in sqsh"),
        (["--in", "oci", "--runtime", "loop"], "--runtime has no effect with --in oci"),
        (["--gpus", "0"], "--gpus has no effect with target cpu"),
        (["--gpus", "0,0"], "is not a list of GPUs"),
        (["--gpus", ""], "is not a list of GPUs"),
        (["--gpus", "-1"], "is not a list of GPUs"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    words = ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--json", *words]
    assert run(words) == UsageError.exit_code
    error = json.loads(capsys.readouterr().out)["error"]
    assert message in error["what"]
    assert error["why"]
    assert error["fix"]


def test_judge_takes_the_options_that_the_plan_had_and_no_others(world, answer, tmp_path):
    had = ["--in", "here", "--repeat", "2", "--only", TP2]
    assert answer("--plan-out", tmp_path / "p", *had)[0] == 0
    run_there(tmp_path / "p")
    for words in (["--in", "oci"], ["--repeat", "3"], ["--in", "sqsh"]):
        status, error = answer("--judge", tmp_path / "p", "--only", TP2, *words)
        assert (status, error["what"]) == (2, f"{' '.join(words)} is not what the plan has")
        assert f"{words[0]} {had[had.index(words[0]) + 1]}" in error["fix"]
    assert world.certificates() == []
    assert answer("--judge", tmp_path / "p", *had)[0] == 0
    assert len(world.certificates()) == 1


@pytest.mark.parametrize("file", ["plan.json", "results/results.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_file_of_the_folder_that_is_no_plain_one_is_refused_and_not_waited_for(shared_world, brought, file, kind):
    (brought / file).unlink()
    if kind == "pipe":
        os.mkfifo(brought / file)
    elif kind == "device":
        (brought / file).symlink_to("/dev/zero")
    else:
        (brought / file).mkdir()
    reason, why = refused(shared_world, brought)
    assert (reason, f"is a {kind} and no plain file" in why) == ("plan" if file == "plan.json" else "schema", True)


def test_log_that_is_a_pipe_is_no_part_of_a_report(tmp_path):
    os.mkfifo(tmp_path / "rank0.log")
    assert end_of(tmp_path / "rank0.log") == ""
    (tmp_path / "rank1.log").write_text("one\ntwo\n")
    assert end_of(tmp_path / "rank1.log") == "one\ntwo"
