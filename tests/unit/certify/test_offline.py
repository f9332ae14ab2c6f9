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
from envbuild.store import entry_index

TP2 = "gpt-fp32-tp2"
OTHER = "sha256:" + "0" * 64


@pytest.fixture
def folder(world, tmp_path):
    """A plan's folder, written."""
    write_plan(world.request(), tmp_path / "plan", world.store)
    return tmp_path / "plan"


def run_there(folder, place="results", **faults):
    """What the runner does where the folder was brought to."""
    plan = (folder / "plan.json").read_bytes()
    told = {"smoke_digest": sha256_file(folder / "smoke.pyz"), **faults}
    write(folder / place / "results.jsonl", results_of(plan, **told))


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


@pytest.mark.parametrize(
    ("place", "said"),
    [("docker", "docker run --rm --network none"), ("oci", "docker run"), ("venv", "python smoke.pyz run")],
)
def test_readme_is_for_the_place(world, tmp_path, place, said):
    image = None if place == "venv" else world.image
    write_plan(world.request(place=place, image=image), tmp_path / "plan", world.store)
    assert said in (tmp_path / "plan" / "README.md").read_text()
    if image:
        assert sha256_file(tmp_path / "plan" / "manifest.json") == world.image.record.oci_digest


def test_plan_needs_of_the_image_its_digests_alone(world, tmp_path):
    (world.image.path / "image.sqsh").unlink()
    write_plan(world.request(), tmp_path / "plan", world.store)
    assert (tmp_path / "plan" / "plan.json").is_file()


def test_folder_that_has_something_is_refused(world, folder):
    with pytest.raises(ConfigurationError, match="is not empty"):
        write_plan(world.request(), folder, world.store)


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
    assert done.statement.predicate.in_ == "here"


def test_results_that_do_not_agree_fail(world, folder):
    run_there(folder, scale={TP2: 1.1})
    with pytest.raises(CertificationFailedError) as caught:
        judge(world, folder)
    assert f"{TP2}: parity-loss" in caught.value.why
    assert world.certificates() == []


# ---- the plan is the one that is made here


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("subject", "lock_digest"), OTHER, f'subject.lock_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "sqsh_digest"), OTHER, f'subject.sqsh_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "oci_digest"), OTHER, f'subject.oci_digest: "{OTHER}" in the folder, "sha256:'),
        (("subject", "sqsh_digest"), "sha256:x", "its repeats, its nonce or its subject is invalid"),
        (("nonce",), "x", "its repeats, its nonce or its subject is invalid"),
        (("nonce",), ["ab" * 16], "is not a plan"),
        (("repeats",), 0, "its repeats, its nonce or its subject is invalid"),
        (("repeats",), 10**9, "its repeats, its nonce or its subject is invalid"),
        (("repeats",), True, "its repeats, its nonce or its subject is invalid"),
        (("subject", "target"), "h200", 'subject.target: "h200" in the folder, "cpu" here'),
        (("cases", 1, "training", "steps"), 1, "cases[1].training.steps: 1 in the folder, 5 here"),
        (("cases", 1, "settings", "batch_p2p_comm"), 1, "cases[1].settings.batch_p2p_comm: 1 in the folder, true here"),
        (("expected_versions",), {}, "expected_versions."),
        (("device",), "cuda", 'device: "cuda" in the folder, "cpu" here'),
        (("approved",), True, "approved: true in the folder, null here"),
    ],
)
def test_plan_that_was_changed_is_refused(world, folder, place, value, said):
    run_there(folder)
    edit(folder, *place, value=value)
    reason, why = refused(world, folder)
    assert reason == "plan"
    assert said in why


@pytest.mark.parametrize("value", ["sha256:x", "x\x1b[2J", 7])
def test_plan_whose_digest_is_none_is_refused_where_no_image_is_here_to_compare(world, folder, value):
    edit(folder, "subject", "oci_digest", value=value)
    run_there(folder)
    reason, why = refused(world, folder, image=None)
    assert (reason, "is not a plan" in why) == ("plan", True)


def test_plan_that_has_a_key_twice_is_refused(world, folder):
    """The runner may have taken the other one."""
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"repeats": 1', '"repeats": 3, "repeats": 1', 1))
    run_there(folder)
    reason, why = refused(world, folder)
    assert (reason, "a key twice" in why) == ("plan", True)


def test_plan_with_another_nonce_than_its_results_is_refused(world, folder):
    run_there(folder)
    edit(folder, "nonce", value="0" * 32)
    reason, why = refused(world, folder)
    assert reason == "plan"
    assert "its nonce is" in why


def test_plan_of_other_cases_is_refused(world, folder):
    run_there(folder)
    reason, why = refused(world, folder, only=())
    assert reason == "plan"
    assert "cases: " in why


def test_estimates_are_no_difference(world, folder):
    edit(folder, "cases", 1, "estimated_seconds", value=12.5)
    run_there(folder)
    assert judge(world, folder)


@pytest.mark.parametrize(
    "data", [None, "", "{", "[]", "{}", '{"subject": {"in": "moon"}, "repeats": 1, "nonce": "n"}', "[" * 99999]
)
def test_folder_without_a_plan_is_refused(world, folder, data):
    run_there(folder)
    (folder / "plan.json").unlink()
    if data is not None:
        (folder / "plan.json").write_text(data)
    assert refused(world, folder)[0] == "plan"


# ---- the results are those of the plan


def test_results_of_another_plan_are_refused(world, folder, tmp_path):
    write_plan(world.request(), tmp_path / "other", world.store)
    run_there(tmp_path / "other")
    shutil.copy(tmp_path / "other/results/results.jsonl", folder / "results")
    assert refused(world, folder)[0] == "plan"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"image": "sha256:" + "0" * 64}, "image"),
        ({"smoke_digest": "sha256:" + "0" * 64}, "smoke"),
        ({"nonce": "0" * 32}, "plan"),
    ],
)
def test_results_of_another_image_or_runner_are_refused(world, folder, faults, reason):
    run_there(folder, **faults)
    assert refused(world, folder)[0] == reason


def test_folder_without_results_is_refused(world, folder):
    assert refused(world, folder)[0] == "missing"


def test_results_that_were_cut_off_are_refused(world, folder):
    run_there(folder)
    file = folder / "results/results.jsonl"
    file.write_text(file.read_text()[:-20])
    assert refused(world, folder)[0] == "truncated"


def spoiled(folder, change):
    """The results that were brought back, with their lines changed."""
    file = folder / "results/results.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: lines[:-1], "truncated"),
        (lambda lines: [*lines[:2], *lines[3:]], "truncated"),
        (lambda lines: [*lines[:2], lines[2][:-1]], "truncated"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "repeated-case"),
        (lambda lines: [*lines[:2], lines[2].replace('"grad_norm"', '"norm"'), *lines[3:]], "schema"),
        (lambda lines: [*lines[:2], lines[2].replace('"case": "', '"case": "x'), *lines[3:]], "plan"),
        (lambda lines: lines[1:], "schema"),
        (lambda lines: [], "missing"),
    ],
    ids=["no-end", "line-gone", "cut", "line-twice", "line-edited", "case-renamed", "no-run", "empty"],
)
def test_results_that_were_spoiled_are_refused_and_cost_no_certificate(world, folder, tmp_path, change, reason):
    run_there(folder)
    before = judge(world, folder).certificate
    content = before.read_bytes()
    write_plan(world.request(), tmp_path / "second", world.store)
    run_there(tmp_path / "second")
    spoiled(tmp_path / "second", change)
    with pytest.raises(ResultsRefusedError) as caught:
        judge(world, tmp_path / "second")
    assert (caught.value.exit_code, caught.value.reason) == (13, reason)
    assert (before.read_bytes(), world.certificates()) == (content, [before])


def test_number_of_a_line_that_was_changed_fails_its_case(world, folder):
    run_there(folder)
    spoiled(folder, lambda lines: [line.replace('"loss": 6.25', '"loss": 6.26') if TP2 in line else line
                                   for line in lines])  # fmt: skip
    with pytest.raises(CertificationFailedError) as caught:
        judge(world, folder)
    assert f"{TP2}: parity-loss: step 2" in caught.value.why
    assert world.certificates() == []


def test_nonce_is_certified_once(world, folder):
    run_there(folder)
    certificate = judge(world, folder).certificate
    remove_tree(certificate.parent)
    # The same plan, run a second time.
    run_there(folder, started_at="2025-12-31T00:00:00Z")
    reason, why = refused(world, folder)
    assert reason == "nonce"
    assert "other results were certified before" in why


@pytest.mark.parametrize(
    ("text", "sealed"),
    [
        ("{}", False),
        *((text, True) for text in ("", "{", "[]", "{}", '{"plan": "x"}', '{"plan": 1, "results": 2}', "[" * 99999)),
        (None, True),
    ],
)
def test_record_of_a_nonce_that_is_damaged_is_reported_and_lets_nothing_pass(world, folder, text, sealed):
    """It was in the folder, so the nonce was used; for what, nobody can say any more."""
    run_there(folder)
    certificate = judge(world, folder).certificate
    remove_tree(certificate.parent)
    (file,) = (world.project / "cache" / "nonces").rglob("judged.json")
    file.unlink()
    if text is not None:
        file.write_text(text)
    if sealed:
        entry_index.write_index(file.parent)
    with pytest.raises(ResultsRefusedError) as caught:
        judge(world, folder)
    assert caught.value.reason == "nonce"
    assert str(file.parent) in caught.value.why
    assert "--plan-out" in caught.value.fix
    assert f"remove {file.parent}" in caught.value.fix
    assert world.certificates() == []
    # The same results are certified again once the user did as told.
    remove_tree(file.parent)
    assert judge(world, folder)


def test_failed_judgement_does_not_use_up_the_nonce(world, folder):
    """The run may have been interrupted, and goes on."""
    run_there(folder, scale={TP2: 1.1})
    with pytest.raises(CertificationFailedError):
        judge(world, folder)
    run_there(folder)
    assert judge(world, folder)


# ---- the command line


@pytest.fixture
def command(world, monkeypatch):
    monkeypatch.chdir(world.project)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(world.project / "cache"))
    return lambda *words: run(
        ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--json", *map(str, words)]
    )


def test_command_that_the_readme_names_judges(world, command, tmp_path, capsys):
    assert command("--plan-out", tmp_path / "p", "--only", TP2) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cases"] == ["gpt-fp32-baseline", TP2]
    run_there(tmp_path / "p")
    text = (tmp_path / "p/README.md").read_text()
    words = re.search(r"^envbuild (certify .*)$", text, re.MULTILINE)[1].split()
    assert run([word if word != "DIR" else str(tmp_path / "p") for word in words]) == 0
    assert len(world.certificates()) == 1


def test_command_without_results_has_a_reason(world, command, tmp_path, capsys):
    assert command("--plan-out", tmp_path / "p") == 0
    capsys.readouterr()
    assert command("--judge", tmp_path / "p") == 13
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "missing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan-out", "x", "--judge", "y"], "--judge has no effect with --plan-out"),
        (["--plan-out", "x", "--gpus", "0"], "--gpus has no effect with --plan-out"),
        (["--plan-out", "x", "--resume"], "--resume has no effect with --plan-out"),
        (["--judge", "x", "--isolation", "live"], "--isolation has no effect with --judge"),
        (["--plan-out", "x", "--key-password", "env:P"], "--key-password has no effect with --plan-out"),
        (["--calibrate", "2", "--key-password", "env:P"], "--key-password has no effect with --calibrate"),
        (["--key-password", "env:P"], "--key-password has no effect without a key"),
        (["--key", "off", "--key-password", "env:P"], "--key-password has no effect without a key"),
        (["--print-cases", "--plan-out", "x"], "--plan-out has no effect with --print-cases"),
        (["--print-cases", "--fresh", "--repeat", "3", "--key", "nope"], "--fresh has no effect with --print-cases"),
        (["--print-cases", "--repeat", "3"], "--repeat has no effect with --print-cases"),
        (["--print-cases", "--key", "nope"], "--key has no effect with --print-cases"),
        (["--print-cases", "--judge", "x"], "--judge has no effect with --print-cases"),
        (["--print-cases", "--calibrate", "3"], "--calibrate has no effect with --print-cases"),
        (["--calibrate", "3", "--fresh"], "--fresh has no effect with --calibrate"),
        (["--calibrate", "3", "--plan-out", "x"], "--plan-out has no effect with --calibrate"),
        (["--venv", "x"], "--venv has no effect with --in sqsh"),
        (["--in", "oci", "--runtime", "loop"], "--runtime has no effect with --in oci"),
        (["--gpus", "0"], "--gpus has no effect with target cpu"),
        (["--gpus", "0,0"], "is not a list of GPUs"),
        (["--gpus", "a"], "is not a list of GPUs"),
        (["--gpus", ""], "is not a list of GPUs"),
        (["--gpus", "-1"], "is not a list of GPUs"),
    ],
)
def test_options_that_do_nothing_are_refused(world, command, capsys, words, said):
    assert command(*words) == UsageError.exit_code
    error = json.loads(capsys.readouterr().out)["error"]
    assert said in error["what"]
    assert error["why"]
    assert error["fix"]
    assert world.calls == []


def test_judge_takes_the_options_that_the_plan_had_and_no_others(world, command, tmp_path, capsys):
    had = ["--in", "here", "--repeat", "2", "--only", TP2]
    assert command("--plan-out", tmp_path / "p", *had) == 0
    run_there(tmp_path / "p")
    for words, said in (
        (["--in", "oci"], "--in oci"),
        (["--repeat", "3"], "--repeat 3"),
        (["--in", "sqsh"], "--in sqsh"),
    ):
        capsys.readouterr()
        assert command("--judge", tmp_path / "p", "--only", TP2, *words) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["what"] == f"{said} is not what the plan has"
        assert f"{words[0]} {had[had.index(words[0]) + 1]}" in error["fix"]
    assert world.certificates() == []
    assert command("--judge", tmp_path / "p", *had) == 0
    assert len(world.certificates()) == 1


@pytest.mark.parametrize("file", ["plan.json", "results/results.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_file_of_the_folder_that_is_no_plain_one_is_refused_and_not_waited_for(world, folder, file, kind):
    run_there(folder)
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "device":
        (folder / file).symlink_to("/dev/zero")
    else:
        (folder / file).mkdir()
    reason, why = refused(world, folder)
    assert (reason, f"is a {kind} and no plain file" in why) == ("plan" if file == "plan.json" else "schema", True)


def test_log_that_is_a_pipe_is_no_part_of_a_report(tmp_path):
    os.mkfifo(tmp_path / "rank0.log")
    assert end_of(tmp_path / "rank0.log") == ""
    (tmp_path / "rank1.log").write_text("one\ntwo\n")
    assert end_of(tmp_path / "rank1.log") == "one\ntwo"


def test_job_of_the_plan_is_another_than_that_of_another_place(world, tmp_path):
    plans = [
        write_plan(world.request(place=place, image=image), tmp_path / place, world.store)
        for place, image in (("sqsh", world.image), ("oci", world.image), ("venv", None))
    ]
    assert len({job.key for job in plans}) == 3
