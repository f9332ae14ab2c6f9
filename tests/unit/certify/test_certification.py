"""`certify` from an image to a certificate, with a runner that can be told to fail: what counts, and what does not."""

import json
import os
import resource
from pathlib import Path

import pytest
from helpers.certify_world import World, edit, place_image, statement_of
from helpers.locks import MAIN, make_lock

from envbuild.catalog.data import data_root
from envbuild.certify.certificate.envelope import SignedBytes, decode, encode
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer
from envbuild.cli.main import run
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    ResultsRefusedError,
)
from envbuild.core.files import remove_tree
from envbuild.lock.lockfile import read_lock

PREDICATE = "predicate"


def set_in(*place, value):
    """An edit of a certificate: the value at a place."""

    def change(statement):
        for key in place[:-1]:
            statement = statement[key]
        assert statement[place[-1]] != value
        statement[place[-1]] = value

    return change


def rename(old, new):
    def change(statement):
        statement[PREDICATE][new] = statement[PREDICATE].pop(old)

    return change


EDITS = {
    "passed": set_in(PREDICATE, "cases", 1, "passed", value=False),
    "loss": set_in(PREDICATE, "cases", 1, "steps", 0, "loss", value=6.3),
    "loss-of-another-type": set_in(PREDICATE, "cases", 1, "steps", 0, "loss", value="6.375"),
    "problem": set_in(PREDICATE, "cases", 1, "problems", value=[{"check": "steps", "text": "none"}]),
    "case-gone": lambda statement: statement[PREDICATE]["cases"].pop(),
    "subject": set_in("subject", 1, "digest", "sha256", value="0" * 64),
    "subject-name": set_in("subject", 1, "name", value="other.sqsh"),
    "subject-more": lambda statement: statement["subject"].append(statement["subject"][0]),
    "tolerance": set_in(PREDICATE, "tolerance", "fp32", "loss_relative", value=1.0),
    "verdict": set_in(PREDICATE, "verdict", value="failed"),
    "key": set_in(PREDICATE, "key", value=f"sha256:{'0' * 64}"),
    "matrix": set_in(PREDICATE, "whole_matrix", value=True),
    "matrix-digest": set_in(PREDICATE, "matrix_digest", value=f"sha256:{'0' * 64}"),
    "matrix-digest-gone": lambda statement: statement[PREDICATE].pop("matrix_digest"),
    "matrix-shipped": set_in(PREDICATE, "matrix_is_shipped", value=False),
    "environment": set_in(PREDICATE, "measured", "environment", "python", value="3.12.0"),
    "seal": set_in(PREDICATE, "seal", value=f"sha256:{'0' * 64}"),
    "seal-gone": lambda statement: statement[PREDICATE].pop("seal"),
    "field-name": rename("runtime", "run_time"),
    "field-more": lambda statement: statement[PREDICATE].update(approved=True),
    "field-gone": lambda statement: statement[PREDICATE].pop("runtime"),
    "outer-field-more": lambda statement: statement.update(approved=True),
    "type": set_in("_type", value="https://in-toto.io/Statement/v2"),
    "issued-in-the-future": set_in(PREDICATE, "issued_at", value="9999-12-31T23:59:59Z"),
    "measured-in-the-future": set_in(PREDICATE, "measured", "finished_at", value="9999-12-31T23:59:59Z"),
    "form-before": set_in("predicateType", value="urn:envbuild:certificate:2"),
    "predicate-gone": lambda statement: statement.pop(PREDICATE),
}


@pytest.fixture
def in_project(world, monkeypatch):
    """The command line in the project of the world."""
    monkeypatch.chdir(world.project)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(world.project / "cache"))

    def command(*arguments):
        return run(["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--json", *arguments])

    return command


@pytest.fixture
def certificate(world: World) -> Path:
    return world.certify().certificate


def assert_certified_again(world: World, problem: str = "") -> None:
    """A certificate that did not count was made anew, of the verdicts that still hold, and now there is one."""
    before = len(world.calls)
    done = world.certify()
    assert not done.ran
    assert len(world.calls) == before
    assert {case.reused.run for case in done.statement.predicate.cases} == {done.statement.predicate.plan_digest}
    assert done.not_counted
    assert problem in done.not_counted
    assert any("does not count" in note and done.not_counted in note for note in world.reporter.notes)
    assert world.certify().ran is False


def test_certificate_as_it_was_written_counts(world, certificate):
    before = certificate.read_bytes()
    done = world.certify()
    assert (done.ran, done.not_counted, len(world.calls)) == (False, "", 1)
    assert [case.id for case in done.statement.predicate.cases] == [case["id"] for case in done.statement.cases_json()]
    assert certificate.read_bytes() == before
    assert not any(note.startswith("note:") for note in world.reporter.notes)


def test_reports_of_a_certificate_that_counts_stay_and_missing_or_older_ones_are_written(world, certificate):
    page, junit = certificate.parent / "report.html", certificate.parent / "junit.xml"
    was = page.read_bytes(), junit.read_bytes()
    stamp = page.stat().st_mtime_ns
    world.certify()
    assert page.stat().st_mtime_ns == stamp
    page.unlink()
    world.certify()
    assert page.read_bytes() == was[0]
    junit.write_text("of a run before it")
    older = certificate.stat().st_mtime_ns - 1
    os.utime(junit, ns=(older, older))
    world.certify()
    assert (page.read_bytes(), junit.read_bytes()) == was


def test_signature_is_not_lost_in_silence(world, tmp_path):
    keys = make_keys(tmp_path, "own", None)
    signed = world.certify(signer=load_signer(str(keys.private), None))
    assert signed.keyid == keys.keyid
    # Signed by anybody it counts where nobody asks for a key.
    assert world.certify().keyid == keys.keyid
    assert not any("was signed" in note for note in world.reporter.notes)
    assert world.certify(fresh=True).keyid is None
    note = f"note: {signed.certificate} was signed by key {keys.keyid}; the new one is not signed (no --key)"
    assert note in world.reporter.notes


def test_certificate_in_another_layout_does_not_count(world, certificate):
    certificate.write_text(json.dumps(json.loads(certificate.read_text()), indent=2))
    assert_certified_again(world, "is not in the form that envbuild writes")


@pytest.mark.parametrize("name", EDITS)
def test_certificate_that_was_edited_does_not_count(world, certificate, name):
    edit(certificate, EDITS[name])
    with pytest.raises(CertificateRefusedError) as caught:
        read_certificate(certificate)
    assert caught.value.exit_code == 12
    assert_certified_again(world, caught.value.why)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"verdict":"passed"', b'"verdict":"failed","verdict":"passed"', "has a key twice"),
        (b'"loss":6.375', b'"loss":NaN', ""),
        (b"{", b"[", ""),
    ],
)
def test_certificate_whose_text_was_damaged_does_not_count(world, certificate, old, new, problem):
    payload = decode(certificate.read_bytes()).payload
    assert old in payload
    certificate.write_bytes(encode(SignedBytes(payload.replace(old, new, 1), None)))
    assert_certified_again(world, problem)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100000])
def test_another_file_in_the_place_of_a_certificate_does_not_count(world, certificate, data):
    certificate.write_bytes(data)
    assert_certified_again(world)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("key", "it is of key sha256:00000"),
        ("subject", "it is about mcore-debian12-cpu.oci"),
        ("subject-name", "other.sqsh"),
        ("subject-more", "names a subject twice"),
        ("case-gone", "its cases are gpt-fp32-baseline"),
        ("matrix-digest", "its matrix certify-quick had another definition (sha256:00000"),
        ("matrix-shipped", "envbuild shipped another matrix certify-quick when it was made"),
        ("issued-in-the-future", "it was issued at 9999-12-31T23:59:59Z, after the moment of verification"),
        ("measured-in-the-future", "its newest numbers are from 9999-12-31T23:59:59Z, after it was issued"),
        ("form-before", "does not say how its matrix was defined"),
        ("passed", "gpt-fp32-tp2 did not pass"),
        ("problem", "gpt-fp32-tp2 did not pass"),
    ],
)
def test_certificate_of_something_else_does_not_count_whatever_its_seal(world, certificate, name, problem):
    edit(certificate, EDITS[name], reseal=True)
    assert_certified_again(world, problem)


def test_json_says_why_a_certificate_did_not_count(world, in_project, capsys):
    assert in_project() == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["ran"], first["not_counted"]) == (True, None)
    edit(Path(first["certificate"]), EDITS["loss"])
    assert in_project("--quiet") == 0
    second = json.loads(capsys.readouterr().out)
    assert (second["ran"], second["cases_run"]) == (False, 0)
    measured = [{**case, "reused": None} for case in second["cases"]]
    assert measured == first["cases"] != second["cases"]
    assert second["not_counted"].startswith("Its seal is sha256:")
    assert in_project("--runtime", "squashfuse") == 0
    shown, told = capsys.readouterr()
    assert json.loads(shown)["not_counted"] == "it was made with runtime loop, not squashfuse"
    assert "does not count: it was made with runtime loop" in told
    assert in_project() == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["ran"], last["not_counted"], last["cases"]) == (False, None, first["cases"])


def test_json_of_the_page_has_the_keys_that_are_printed(world, in_project, capsys):
    page = (data_root() / "docs" / "reference" / "certify.md").read_text()
    documented = json.loads(page.partition("## --json\n\n```json\n")[2].partition("```")[0])
    assert in_project() == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(documented) == list(shown)
    (case,) = documented["cases"]
    assert list(case) == list(shown["cases"][0])
    assert list(case["steps"][0]) == list(shown["cases"][0]["steps"][0])
    world.faults = FAULTS["a-loss"]
    assert in_project("--fresh") == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert all(f"`{name}`" in page for name in ("cases", "problems", "environment_findings"))
    assert {"cases", "problems", "environment_findings"} <= set(error)


# ---- the runtime


def test_runtime_that_is_named_is_the_one_that_is_used(world):
    assert world.certify().statement.predicate.runtime == "loop"
    done = world.certify(runtime="unpack")
    assert (done.ran, done.statement.predicate.runtime) == (True, "unpack")
    assert done.not_counted == "it was made with runtime loop, not unpack"
    assert [call["runtime"] for call in world.calls] == ["loop", "unpack"]


@pytest.mark.parametrize("named", [None, "unpack"])
def test_certificate_of_the_runtime_that_is_named_or_of_any_where_none_is_counts(world, named):
    world.certify(runtime="unpack")
    assert world.certify(runtime=named).ran is False


# ---- the driver


def told_no_cases(error, driver, says):
    assert error["exit_code"] == 8
    assert error["what"] == f"there are no certification cases for driver {driver} yet"
    assert error["why"].startswith(says)
    assert error["why"].endswith("the smoke runner has cases for: mcore.")


@pytest.mark.parametrize(
    ("stack", "base", "driver"),
    [
        ("nemo-2.7", "ubuntu2404-cu130", "nemo"),
        ("bridge-0.6", "ubuntu2404-cu130", "bridge"),
        ("nemo", None, "nemo or bridge"),
    ],
)
def test_stack_whose_driver_has_no_cases_is_refused_before_lock_and_image(
    world, in_project, capsys, stack, base, driver
):
    arguments = ["certify", "--stack", stack, "--target", "h200", "--json", *(["--base", base] if base else [])]
    assert run(arguments) == 8
    told_no_cases(strict(capsys.readouterr().out)["error"], driver, f"The file of stack {stack} names it")


@pytest.mark.parametrize("driver", ["nemo", "bridge"])
def test_lock_whose_driver_has_no_cases_is_refused_before_the_image(world, in_project, capsys, driver):
    make_lock(world.lock.path, inputs=world.lock.lock.inputs, driver=driver)
    remove_tree(world.image.path)
    assert in_project() == 8
    told_no_cases(strict(capsys.readouterr().out)["error"], driver, "The lock of stack mcore on debian12 names it")
    assert world.calls == []
    with pytest.raises(CertificationCannotRunError, match=f"for driver {driver} yet"):
        world.certify(lock=read_lock(world.lock.path))


# ---- the lock


@pytest.mark.parametrize("current", [True, False])
def test_certificate_and_json_say_whether_the_lock_is_current(world, in_project, capsys, current):
    own = world.project / "envs" / "stacks" / "mcore.toml"
    own.parent.mkdir(parents=True)
    text = (data_root() / "envs" / "stacks" / "mcore.toml").read_text()
    own.write_text(text if current else text.replace('"==2.13.0"', '">=2.13.0,<2.14"'))
    assert in_project("--quiet") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["lock_is_current"] is current
    assert statement_of(Path(shown["certificate"]))["predicate"]["lock_is_current"] is current
    own.write_text(text)
    assert in_project("--quiet") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ran"], shown["lock_is_current"]) == (False, True)


# ---- a lock of a name of its own


@pytest.fixture
def named(world):
    """The world with a lock named try1 of its stack, other than the stack's own, and the image of it."""
    path = world.project / "lockfiles" / "try1" / "debian12"
    make_lock(path, main=MAIN.replace("0.30", "0.31"), inputs=world.lock.lock.inputs)
    world.image = place_image(world.project / "out", read_lock(path), "try1")
    return world


def test_lock_of_a_name_is_certified_beside_that_of_the_stack(named, in_project, capsys):
    assert in_project() == 0
    own = json.loads(capsys.readouterr().out)
    assert in_project("--name", "try1") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ran"], len(named.calls)) == (True, 2)
    folder = Path(shown["certificate"]).parent.parent
    assert folder == named.project / "out" / "certificates" / "try1-debian12-cpu"
    statement = statement_of(Path(shown["certificate"]))
    assert [subject["name"] for subject in statement["subject"]] == ["try1-debian12-cpu.oci", "try1-debian12-cpu.sqsh"]
    assert statement["predicate"]["lock_digest"] == named.image.record.lock_digest
    assert statement_of(Path(own["certificate"]))["predicate"]["lock_digest"] == named.lock.lock.digest
    assert in_project("--name", "try1") == 0
    assert json.loads(capsys.readouterr().out)["ran"] is False


def test_image_of_a_name_that_is_not_there_is_asked_for_by_that_name(named, in_project, capsys):
    remove_tree(named.image.path)
    assert in_project("--name", "try1") == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "there is no image of stack mcore on base debian12 for target cpu, lock try1"
    assert "envbuild image --stack mcore --base debian12 --target cpu --name try1" in error["fix"]


def test_image_of_a_name_from_a_lock_before_is_built_again_by_that_name(named, in_project, capsys):
    make_lock(named.project / "lockfiles" / "try1" / "debian12", inputs=named.lock.lock.inputs)
    assert in_project("--name", "try1") == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"].endswith("was made from another lock")
    command = "Build it again: envbuild image --stack mcore --base debian12 --target cpu --name try1"
    assert error["fix"].startswith(command)


# ---- a failing run

TP2 = "gpt-fp32-tp2"
FINDING = {"code": "version-mismatch", "package": "torch", "expected": "2.13.0+cpu", "found": "2.12.0"}
FAULTS = {
    "a-loss": {"scale": {TP2: 1.001}},
    "not-finite": {"scale": {TP2: float("nan")}},
    "a-version": {"findings": [FINDING]},
}


def strict(text):
    """JSON as the standard has it: without NaN."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", FAULTS)
def test_failing_run_shows_the_cases_as_a_passing_one_does(world, in_project, capsys, name):
    assert in_project() == 0
    passing = strict(capsys.readouterr().out)["cases"]
    world.faults = FAULTS[name]
    assert in_project("--fresh") == 7
    error = strict(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 7
    assert [case["id"] for case in error["cases"]] == [case["id"] for case in passing]
    assert [set(case) for case in error["cases"]] == [set(case) for case in passing]
    found = {case["id"]: case for case in error["cases"]}
    assert [name for name, case in found.items() if not case["passed"]] == ([] if name == "a-version" else [TP2])
    assert [f"{TP2}: {problem['check']}: {problem['text']}" for problem in found[TP2]["problems"]] == [
        line for line in error["why"].splitlines() if line.startswith(TP2)
    ]
    assert len(found[TP2]["steps"]) == 5
    assert found[TP2]["steps"][0]["loss"] == {"a-version": 6.375, "a-loss": 6.375 * 1.001, "not-finite": None}[name]
    assert error["environment_findings"] == ([FINDING] if name == "a-version" else [])


def test_sweep_that_failed_is_a_failure_of_the_run(world, in_project, capsys):
    matrices = world.project / "envs" / "matrices"
    matrices.mkdir(parents=True, exist_ok=True)
    quick = world.selection.catalog.path("matrices", "certify-quick").read_text()
    (matrices / "swept.toml").write_text(f'{quick}\n[bandwidth]\nsizes_bytes = [1024]\ndevices = ["cpu"]\n')
    failure = {"rank": 1, "exit_status": 1, "kind": "exception", "message": "connection timed out", "log": None}
    world.faults = {"sweep": {"backend": None, "transports": None, "points": [], "failure": failure}}
    assert in_project("--matrix", "swept") == 7
    (problem,) = strict(capsys.readouterr().out)["error"]["problems"]
    assert problem == {"check": "bandwidth", "text": "measuring it failed: connection timed out"}
    (page,) = (world.project / "out").rglob("report.html")
    assert "connection timed out" in page.read_text()


def test_results_that_cannot_be_judged_are_refused(world, in_project, capsys):
    world.spoil = lambda results: results.write_text("{")
    assert in_project() == 13
    error = strict(capsys.readouterr().out)["error"]
    assert (error["kind"], error["reason"]) == ("ResultsRefusedError", "truncated")
    assert "cannot be judged" in error["what"]
    assert "cases" not in error


def cut_off(results):
    """The runner ended before its last line."""
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))


SPOILED = {"cut-off": cut_off, "damaged": lambda results: results.write_text("{")}


@pytest.mark.parametrize("name", [*FAULTS, *SPOILED])
def test_failing_run_leaves_no_certificate_not_even_an_older_one(world, name):
    certificate = world.certify().certificate
    world.faults, world.spoil = FAULTS.get(name, {}), SPOILED.get(name, lambda results: None)
    refused = ResultsRefusedError if name in SPOILED else CertificationFailedError
    with pytest.raises(refused):
        world.certify(fresh=True)
    assert not certificate.exists()
    with pytest.raises(refused):
        world.certify()
    assert world.certificates() == []


def test_environment_that_differs_from_the_lock_fails_also_where_every_case_agrees(world):
    world.faults = FAULTS["a-version"]
    with pytest.raises(CertificationFailedError, match="the environment is not what was locked") as caught:
        world.certify()
    assert caught.value.why == "environment: version-mismatch: torch: expected 2.13.0+cpu, found 2.12.0"
    assert world.certificates() == []
    (page,) = (world.project / "out").rglob("report.html")
    for text in (page.read_text(), page.with_name("junit.xml").read_text().partition("<failure")[2].partition(">")[2]):
        assert text.count("version-mismatch: torch: expected 2.13.0+cpu, found 2.12.0") == 1


@pytest.mark.parametrize("name", ["certificate.intoto.jsonl", "report.html"])
def test_file_that_cannot_be_written_leaves_the_one_from_before(world, in_project, capsys, name):
    """A limit to the size of files is what fills the disk, from the moment when the results are there."""
    certificate = world.certify().certificate
    file = certificate.with_name(name)
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    world.spoil = lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 100, limits[1]))
    try:
        status = in_project("--fresh")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    shown = strict(capsys.readouterr().out)
    assert (status, shown["error"]["kind"]) == (11, "MachineError")
    assert name in shown["error"]["what"]
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []
    # What was measured is not lost: the certificate is made of it, and the reports are.
    world.spoil = lambda _: None
    assert world.certify().ran is False
    assert certificate.is_file()
    assert b"Certified" in certificate.with_name("report.html").read_bytes()


def test_fresh_runs_where_a_certificate_counts(world):
    world.certify()
    assert world.certify(fresh=True).ran
    assert len(world.calls) == 2
