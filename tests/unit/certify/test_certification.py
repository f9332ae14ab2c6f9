"""`certify` from an image to a certificate, with a runner that can be made to fail: what counts, and what does not."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.certify_world import World, edit, statement_of
from helpers.locks import MAIN, make_lock
from helpers.placed_images import place_image

from envbuild.catalog.data import data_root
from envbuild.certify import certify
from envbuild.certify.certificate.envelope import SignedBytes, decode, encode
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer
from envbuild.certify.certify import CertifyOptions
from envbuild.certify.run.job import make_job
from envbuild.cli.main import run
from envbuild.core.errors import CertificateRefusedError, CertificationFailedError, ResultsRefusedError
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


EDITS = {
    "passed": set_in(PREDICATE, "cases", 1, "passed", value=False),
    "loss": set_in(PREDICATE, "cases", 1, "steps", 0, "loss", value=6.3),
    "problem": set_in(PREDICATE, "cases", 1, "problems", value=[{"check": "steps", "text": "none"}]),
    "case-gone": lambda statement: statement[PREDICATE]["cases"].pop(),
    "subject": set_in("subject", 1, "digest", "sha256", value="0" * 64),
    "subject-name": set_in("subject", 1, "name", value="other.sqsh"),
    "subject-more": lambda statement: statement["subject"].append(statement["subject"][0]),
    "key": set_in(PREDICATE, "key", value=f"sha256:{'0' * 64}"),
    "matrix-digest": set_in(PREDICATE, "matrix_digest", value=f"sha256:{'0' * 64}"),
    "matrix-shipped": set_in(PREDICATE, "matrix_is_shipped", value=False),
    "seal": set_in(PREDICATE, "seal", value=f"sha256:{'0' * 64}"),
    "seal-gone": lambda statement: statement[PREDICATE].pop("seal"),
    "field-more": lambda statement: statement[PREDICATE].update(approved=True),
    "issued-in-the-future": set_in(PREDICATE, "issued_at", value="9999-12-31T23:59:59Z"),
    "measured-in-the-future": set_in(PREDICATE, "measured", "finished_at", value="9999-12-31T23:59:59Z"),
    "form-before": set_in("predicateType", value="urn:envbuild:certificate:2"),
    "predicate-gone": lambda statement: statement.pop(PREDICATE),
}
# Why a certificate that was edited and sealed again does not count.
RESEALED = {
    "key": "it is of key sha256:00000",
    "subject": "it is about mcore-debian12-cpu.oci",
    "subject-name": "other.sqsh",
    "subject-more": "names a subject twice",
    "case-gone": "its cases are gpt-fp32-baseline",
    "matrix-digest": "its matrix certify-quick had another definition (sha256:00000",
    "matrix-shipped": "envbuild shipped another matrix certify-quick when it was made",
    "issued-in-the-future": "it was issued at 9999-12-31T23:59:59Z, after the moment of verification",
    "measured-in-the-future": "its newest numbers are from 9999-12-31T23:59:59Z, after it was issued",
    "form-before": "predicateType",
    "passed": "gpt-fp32-tp2 did not pass",
    "problem": "gpt-fp32-tp2 did not pass",
}


@pytest.fixture
def certificate(world: World) -> Path:
    return world.certify().certificate


@pytest.fixture(scope="module")
def written(shared_world: World) -> bytes:
    """A certificate as it was written."""
    return shared_world.certify().certificate.read_bytes()


@pytest.fixture
def not_counted(world: World) -> Callable[[], str | None]:
    """Returns why the certificate of the world does not count."""
    job = make_job(world.request(), world.store)
    return lambda: certify._why_not_counted(job, world.context, CertifyOptions())


def test_certificate_as_it_was_written_counts_with_its_reports(world, certificate):
    page, junit = certificate.parent / "report.html", certificate.parent / "junit.xml"
    before, was, stamp = certificate.read_bytes(), (page.read_bytes(), junit.read_bytes()), page.stat().st_mtime_ns
    done = world.certify()
    assert (done.ran, done.not_counted, done.lock_is_current, len(world.calls)) == (False, "", True, 1)
    assert done.statement.predicate.lock_is_current
    assert (certificate.read_bytes(), page.stat().st_mtime_ns) == (before, stamp)
    assert not any(note.startswith("note:") for note in world.reporter.lines)
    # Reports that are missing or older are written again.
    page.unlink()
    junit.write_text("of a run before it")
    older = certificate.stat().st_mtime_ns - 1
    os.utime(junit, ns=(older, older))
    world.certify()
    assert (page.read_bytes(), junit.read_bytes()) == was
    assert world.certify(fresh=True).ran
    assert len(world.calls) == 2


def test_signature_is_not_lost_in_silence(world, tmp_path):
    keys = make_keys(tmp_path, "own", None)
    signed = world.certify(signer=load_signer(str(keys.private), None))
    assert signed.keyid == keys.keyid
    # A signature of any key counts where none is required.
    assert world.certify().keyid == keys.keyid
    assert not any("was signed" in note for note in world.reporter.lines)
    assert world.certify(fresh=True).keyid is None
    note = f"note: {signed.certificate} was signed by key {keys.keyid}; the new one is not signed (no --key)"
    assert note in world.reporter.lines


@pytest.mark.parametrize("name", EDITS)
def test_certificate_that_was_edited_is_refused(written, tmp_path, name):
    certificate = tmp_path / "certificate"
    certificate.write_bytes(written)
    edit(certificate, EDITS[name])
    with pytest.raises(CertificateRefusedError) as caught:
        read_certificate(certificate)
    assert caught.value.exit_code == 12
    assert caught.value.why


def test_certificate_of_something_else_does_not_count_whatever_its_seal(world, certificate, not_counted):
    content = certificate.read_bytes()
    for name, problem in RESEALED.items():
        certificate.write_bytes(content)
        assert not_counted() is None
        edit(certificate, EDITS[name], reseal=True)
        assert problem in (not_counted() or "")
    done = world.certify()
    assert (done.ran, bool(done.not_counted)) == (True, True)
    assert any("does not count" in note and done.not_counted in note for note in world.reporter.lines)
    assert world.certify().not_counted == ""


def test_damaged_certificate_does_not_count(certificate, not_counted):
    content = certificate.read_bytes()
    payload = decode(content).payload
    for data, problem in (
        (json.dumps(json.loads(content), indent=2).encode(), "is not in the form that envbuild writes"),
        *(
            (encode(SignedBytes(payload.replace(old, new, 1), None)), problem)
            for old, new, problem in (
                (b'"verdict":"passed"', b'"verdict":"failed","verdict":"passed"', "has a key twice"),
                (b'"loss":6.375', b'"loss":NaN', ""),
                (b"{", b"[", ""),
            )
        ),
        *((data, "") for data in (b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100000)),
    ):
        assert data != content
        certificate.write_bytes(data)
        why = not_counted()
        assert why
        assert problem in why


def test_json_has_the_reason_why_a_certificate_did_not_count(world, answer, command, capsys):
    _, first = answer()
    assert (first["ran"], first["not_counted"]) == (True, None)
    edit(Path(first["certificate"]), EDITS["loss"])
    _, second = answer("--quiet")
    assert (second["ran"], second["cases"]) == (True, first["cases"])
    assert second["not_counted"].startswith("Its seal is sha256:")
    assert command("--runtime", "squashfuse", "--json") == 0
    shown, notes = capsys.readouterr()
    assert json.loads(shown)["not_counted"] == "it was made with runtime loop, not squashfuse"
    assert "does not count: it was made with runtime loop" in notes
    _, last = answer()
    assert (last["ran"], last["not_counted"], last["cases"]) == (False, None, first["cases"])


def test_json_of_the_page_has_the_keys_that_are_printed(world, answer):
    page = (data_root() / "docs" / "reference" / "certify.md").read_text()
    documented = json.loads(page.partition("## --json\n\n```json\n")[2].partition("```")[0])
    _, shown = answer()
    assert list(documented) == list(shown)
    (case,) = documented["cases"]
    assert list(case) == list(shown["cases"][0])
    assert list(case["steps"][0]) == list(shown["cases"][0]["steps"][0])
    world.faults = FAULTS["a-loss"]
    status, error = answer("--fresh")
    assert status == 7
    keys = {"cases", "problems", "environment_findings"}
    assert all(f"`{name}`" in page for name in keys)
    assert keys <= set(error)


def test_runtime_that_is_named_is_the_one_that_is_used(world):
    assert world.certify().statement.predicate.runtime == "loop"
    done = world.certify(runtime="unpack")
    assert (done.ran, done.statement.predicate.runtime) == (True, "unpack")
    assert done.not_counted == "it was made with runtime loop, not unpack"
    assert [call["runtime"] for call in world.calls] == ["loop", "unpack"]
    assert not world.certify(runtime="unpack").ran
    assert not world.certify().ran


# ---- the driver


@pytest.mark.parametrize(
    ("stack", "base", "matrix", "driver"),
    [
        ("nemo-2.7", "ubuntu2404-cu130", "certify-quick", "nemo"),
        ("nemo", None, "certify-full", "nemo or bridge"),
        ("bridge-0.6", "ubuntu2404-cu130", "nemo-recipes", "bridge"),
        ("mcore", "ubuntu2404-cu130", "nemo-recipes", "mcore"),
    ],
)
def test_matrix_of_another_driver_is_refused_before_lock_and_image(
    tmp_path, monkeypatch, capsys, stack, base, matrix, driver
):
    monkeypatch.chdir(tmp_path)
    arguments = ["certify", "--stack", stack, "--target", "h200", "--matrix", matrix, "--json"]
    assert run([*arguments, *(["--base", base] if base else [])]) == 8
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == f"matrix {matrix} has no cases for driver {driver}"
    other = {"mcore": "certify-full", "bridge": "bridge-recipes"}.get(driver, "nemo-recipes")
    assert error["fix"] == f"Nothing was run. Choose another matrix: --matrix {other}."


# ---- the lock


def test_certificate_and_json_state_whether_the_lock_is_current(world, answer):
    own = world.project / "envs" / "stacks" / "mcore.toml"
    own.parent.mkdir(parents=True)
    text = (data_root() / "envs" / "stacks" / "mcore.toml").read_text()
    own.write_text(text.replace('"==2.13.0"', '">=2.13.0,<2.14"'))
    _, shown = answer("--quiet")
    assert shown["lock_is_current"] is False
    assert statement_of(Path(shown["certificate"]))["predicate"]["lock_is_current"] is False
    own.write_text(text)
    _, shown = answer("--quiet")
    assert (shown["ran"], shown["lock_is_current"]) == (False, True)


def test_named_lock_is_certified_next_to_the_stacks_own(world, answer):
    path = world.project / "lockfiles" / "try1" / "debian12"
    make_lock(path, main=MAIN.replace("0.30", "0.31"), inputs=world.lock.lock.inputs)
    image = place_image(world.project / "out", read_lock(path), "try1")
    _, own = answer()
    world.image = image
    _, shown = answer("--name", "try1")
    assert (shown["ran"], len(world.calls)) == (True, 2)
    folder = Path(shown["certificate"]).parent.parent
    assert folder == world.project / "out" / "certificates" / "try1-debian12-cpu"
    statement = statement_of(Path(shown["certificate"]))
    names = [subject["name"] for subject in statement["subject"]]
    assert names == [f"try1-debian12-cpu.{form}" for form in ("oci", "sqsh", "docker")]
    assert statement["predicate"]["lock_digest"] == image.record.lock_digest
    assert statement_of(Path(own["certificate"]))["predicate"]["lock_digest"] == world.lock.lock.digest
    assert answer("--name", "try1")[1]["ran"] is False
    # Errors give the command with the name.
    build = "envbuild image --stack mcore --base debian12 --target cpu --name try1"
    make_lock(path, inputs=world.lock.lock.inputs)
    status, error = answer("--name", "try1")
    assert (status, error["fix"].startswith(f"Build it again: {build}")) == (3, True)
    assert error["what"].endswith("was made from another lock")
    remove_tree(image.path)
    status, error = answer("--name", "try1")
    assert error["what"] == "there is no image of stack mcore on base debian12 for target cpu, lock try1"
    assert (status, build in error["fix"]) == (3, True)


# ---- a failing run

TP2 = "gpt-fp32-tp2"
FINDING = {"code": "version-mismatch", "package": "torch", "expected": "2.13.0+cpu", "found": "2.12.0"}
FAULTS = {
    "a-loss": {"scale": {TP2: 1.001}},
    "not-finite": {"scale": {TP2: float("nan")}},
    "a-version": {"findings": [FINDING]},
}


def test_failing_run_shows_the_cases_as_a_passing_one_and_leaves_no_certificate(world, answer):
    _, passing = answer("--only", TP2)
    for name, faults in FAULTS.items():
        world.faults = faults
        status, error = answer("--only", TP2, "--fresh")
        assert (status, error["exit_code"]) == (7, 7)
        assert world.certificates() == []
        assert [set(case) for case in error["cases"]] == [set(case) for case in passing["cases"]]
        _, case = error["cases"]
        assert (case["id"], case["passed"]) == (TP2, name == "a-version")
        assert [f"{TP2}: {problem['check']}: {problem['text']}" for problem in case["problems"]] == [
            line for line in error["why"].splitlines() if line.startswith(TP2)
        ]
        losses = {"a-version": 6.375, "a-loss": 6.375 * 1.001, "not-finite": None}
        assert (len(case["steps"]), case["steps"][0]["loss"]) == (5, losses[name])
        assert error["environment_findings"] == ([FINDING] if name == "a-version" else [])
        assert answer("--only", TP2)[0] == 7


def test_run_that_failed_since_its_checkpoints_filled_the_disk_is_no_finding(world, answer, monkeypatch):
    def fill(results):
        checkpoints = results.with_name("checkpoints")
        checkpoints.mkdir()
        monkeypatch.setattr("envbuild.certify.issue.space_is_low", lambda _: checkpoints.exists())

    world.faults, world.spoil = FAULTS["not-finite"], fill
    status, error = answer("--only", TP2)
    assert (status, error["kind"]) == (11, "MachineError")
    assert list((world.project / "out").rglob("report.html")) == []
    assert list((world.project / "out").rglob("checkpoints")) == []


def test_sweep_that_failed_is_a_failure_of_the_run(world, answer):
    matrices = world.project / "envs" / "matrices"
    matrices.mkdir(parents=True, exist_ok=True)
    quick = world.selection.catalog.path("matrices", "certify-quick").read_text()
    (matrices / "swept.toml").write_text(f'{quick}\n[bandwidth]\nsizes_bytes = [1024]\ndevices = ["cpu"]\n')
    failure = {"rank": 1, "exit_status": 1, "kind": "exception", "message": "connection timed out", "log": None}
    world.faults = {"sweep": {"backend": None, "transports": None, "points": [], "failure": failure}}
    status, error = answer("--matrix", "swept")
    assert status == 7
    assert error["problems"] == [{"check": "bandwidth", "text": "measuring it failed: connection timed out"}]
    (page,) = (world.project / "out").rglob("report.html")
    assert "connection timed out" in page.read_text()


def test_results_that_cannot_be_judged_are_refused_and_leave_no_certificate(world, certificate, answer):
    world.spoil = lambda results: results.write_text("{")
    status, error = answer("--fresh", "--only", TP2)
    assert (status, error["kind"], error["reason"]) == (13, "ResultsRefusedError", "truncated")
    assert "cannot be judged" in error["what"]
    assert "cases" not in error
    assert world.certificates() == []
    with pytest.raises(ResultsRefusedError):
        world.certify()


def test_environment_that_differs_from_the_lock_fails_also_where_every_case_agrees(world):
    world.faults = FAULTS["a-version"]
    with pytest.raises(CertificationFailedError, match="the environment is not what was locked") as caught:
        world.certify()
    assert caught.value.why == "environment: version-mismatch: torch: expected 2.13.0+cpu, found 2.12.0"
    (page,) = (world.project / "out").rglob("report.html")
    for text in (page.read_text(), page.with_name("junit.xml").read_text().partition("<failure")[2].partition(">")[2]):
        assert text.count("version-mismatch: torch: expected 2.13.0+cpu, found 2.12.0") == 1


@pytest.mark.parametrize("name", ["certificate.intoto.jsonl", "report.html"])
def test_file_that_cannot_be_written_leaves_the_one_from_before(world, answer, name):
    """A limit to the size of files is what fills the disk, from the moment when the results are there."""
    certificate = world.certify().certificate
    file = certificate.with_name(name)
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    world.spoil = lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 100, limits[1]))
    try:
        status, error = answer("--fresh", "--only", TP2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, error["kind"]) == (11, "MachineError")
    assert name in error["what"]
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []
    world.spoil = lambda _: None
    world.certify()
    assert certificate.is_file()
    assert b"Certified" in certificate.with_name("report.html").read_bytes()
