"""The content of a certificate, and its subject: an image where one was certified, else the lock, and never both."""

import hashlib
import json

import pytest
from helpers.certificates import SHA, case_of, cases, machine, measured, statement
from pydantic import ValidationError

from envbuild.certify.certificate.envelope import SignedBytes, encode
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import write_certificate
from envbuild.certify.certificate.statement import PREDICATE_TYPE, STATEMENT_TYPE, Certificate, seal_of
from envbuild.certify.report.describe import lines
from envbuild.certify.report.model import report_of
from envbuild.certify.report.page import page_html
from envbuild.core.digests import canonical_json
from envbuild.core.errors import CertificateRefusedError, ConfigurationError

NAME = "mcore-ubuntu2404-cu130-h200"


def hexadecimal(name):
    return SHA[name].removeprefix("sha256:")


def test_statement_holds_every_number_and_what_decided_it():
    made = statement(cases=[*cases(), case_of("gpt-fp32-tp2", repeat=2)])
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    # in-toto knows these fields of a statement and of a subject, and cosign reads no others.
    assert set(made) == {"_type", "subject", "predicateType", "predicate"}
    assert (made["_type"], made["predicateType"]) == (STATEMENT_TYPE, PREDICATE_TYPE)
    assert made["subject"] == [
        {"name": f"{NAME}.oci", "digest": {"sha256": hexadecimal("oci")}},
        {"name": f"{NAME}.sqsh", "digest": {"sha256": hexadecimal("sqsh")}},
    ]
    predicate = made["predicate"]
    assert predicate["cases"][:-1] == cases()
    assert predicate["measured"] == measured()
    assert (predicate["form"], predicate["launcher"], predicate["nonce"]) == ("sqsh", "bwrap", "ab" * 16)
    assert predicate["lock_digest"] == SHA["lock"]
    # The seal as the docs describe it.
    seal = predicate.pop("seal")
    text = json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert seal == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("launcher", ["venv", "here"])
def test_run_without_an_image_certifies_the_lock_whatever_digests_are_named(launcher):
    made = statement(subject={"form": "none", "launcher": launcher})
    assert made["subject"] == [{"name": f"{NAME}.lock", "digest": {"sha256": hexadecimal("lock")}}]


@pytest.mark.parametrize(
    ("subject", "forms"),
    [
        ({"form": "oci", "launcher": "docker", "sqsh_digest": ""}, ["oci"]),
        ({"oci_digest": ""}, ["sqsh"]),
        ({}, ["oci", "sqsh"]),
    ],
)
def test_image_is_a_subject_in_the_forms_that_it_has(subject, forms):
    assert [named["name"].rpartition(".")[2] for named in statement(subject=subject)["subject"]] == forms


def subjects(*kinds):
    return [
        {"name": f"x.{kind}", "digest": {"sha256": hexadecimal("lock" if kind == "lock" else "oci")}} for kind in kinds
    ]


@pytest.mark.parametrize(
    ("form", "subject", "words"),
    [
        ("none", subjects("oci"), "certifies a lock and no image"),
        ("none", subjects("lock", "oci"), "certifies a lock and no image"),
        ("sqsh", subjects("lock"), "certifies that image"),
        ("sqsh", subjects("oci", "oci"), "a subject twice"),
        ("none", [{"name": "x.lock", "digest": {"sha256": "0" * 64}}], "another lock"),
        ("sqsh", [], "at least 1 item"),
    ],
)
def test_subject_that_does_not_fit_the_form_is_refused(form, subject, words):
    made = statement()
    made["subject"], made["predicate"]["form"] = subject, form
    with pytest.raises(ValidationError, match=words):
        Certificate.model_validate(made)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"passed": False}, "did not pass"),
        ({"problems": [{"check": "parity-loss", "text": "x"}]}, "did not pass"),
        ({"steps": []}, "has no numbers"),
        ({"steps": [{"step": 1, "loss": None, "grad_norm": 1.0, "seconds": 0.1}]}, "not finite"),
        ({"steps": [{"step": 1, "loss": float("nan"), "grad_norm": 1.0, "seconds": 0.1}]}, "finite"),
        ({"repeat": 0}, "greater"),
        ({"surprise": 1}, "Extra"),
    ],
)
def test_no_statement_is_made_of_a_case_that_did_not_pass(changes, words):
    with pytest.raises(ValidationError, match=words):
        statement(cases=[case_of("gpt-fp32-tp2", **changes)])


@pytest.mark.parametrize("moment", ["2026-13-01T00:00:00Z", "2026-01-01", "yesterday", "2026-1-1T0:0:0Z", None])
def test_invalid_timestamp_is_refused(moment):
    for name in ("started_at", "finished_at"):
        with pytest.raises(ValidationError, match=name):
            statement(measured=measured(**{name: moment}))


def test_summary_names_signature_and_differences():
    made = Certificate.model_validate(
        statement(
            whole_matrix=False,
            cases=[case_of("gpt-fp32-baseline"), case_of("gpt-fp32-tp2")],
        )
    )
    text = "\n".join(lines(made, None))
    for words in (
        "NOT SIGNED", "a PART of the matrix: 2 cases", "2 x NVIDIA H200",
        "driver 580.82.07, CUDA 13.0, NCCL 2.27.7",
        f"{NAME}.sqsh  {SHA['sqsh']}", "up to 349.0 GB/s", "nonce abab",
    ):  # fmt: skip
        assert words in text
    table = text.splitlines()[-7:-4]
    assert table[0].split() == ["case", "repeat", "loss", "grad", "norm", "weights", "gradients"]
    assert table[2].split() == [
        *("gpt-fp32-tp2", "1", "2.5e-07", "of", "1e-05", "1.9e-06", "of", "0.0001", "-"),
        *("3.0e-07", "of", "1e-06"),
    ]
    assert text.splitlines()[-1] == (
        "gpt-fp32-baseline with its weights moved: 4 times, loss 3.0e-08, grad norm 2.0e-07, weights 1.0e-06; "
        "in half of the tensors a gradient's norm off by 1.0e-06 is caught"
    )
    assert text.splitlines()[-3] == (
        "gpt-fp32-baseline and the reference: loss 3.0e-08 of 1e-06, grad norm 3.0e-07 of 0.0001, "
        "activations 2.5e-07 of 1e-05, gradients 6.0e-07 of 1e-05, weights 1.6e-06 of 2e-05"
    )
    assert "key abc" in "\n".join(lines(made, "abc"))


def test_certificate_of_an_older_judge_is_still_one():
    """Judges before 7 compared with no reference, those before 8 measured no bands; their certificates show it."""
    older = statement()
    for case in older["predicate"]["cases"]:
        del case["reference"], case["spread"]
    older["predicate"]["seal"] = seal_of(older)
    certificate = Certificate.model_validate(older)
    assert lines(certificate, None)[-3:] == [
        "gpt-fp32-baseline and the reference: not compared",
        "",
        "gpt-fp32-baseline with its weights moved: not measured",
    ]


def test_missing_folder_or_huge_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no certificate"):
        read_certificate(tmp_path / "none")
    with pytest.raises(CertificateRefusedError, match="is refused"):
        read_certificate(tmp_path)
    huge = tmp_path / "huge"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # one hole: reading it would take the memory of the machine
    with pytest.raises(CertificateRefusedError) as caught:
        read_certificate(huge)
    assert "larger than 32 MiB" in caught.value.why


def test_same_statement_is_the_same_bytes(tmp_path):
    made = statement()
    for name, content in (("one", made), ("two", dict(reversed(list(made.items()))))):
        write_certificate(tmp_path / name, content, None)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    ("word", "form", "launcher"),
    [("sqsh", "sqsh", "bwrap"), ("docker", "oci", "docker"), ("here", "none", "here")],
)
def test_certificate_of_the_version_before_is_read(tmp_path, word, form, launcher):
    made = statement(subject={"form": form, "launcher": launcher, **({} if form == "sqsh" else {"sqsh_digest": ""})})
    made["predicateType"] = "urn:envbuild:certificate:3"
    predicate = made["predicate"]
    del predicate["form"], predicate["launcher"]
    predicate["in"] = word
    predicate["seal"] = seal_of(made)
    path = tmp_path / "certificate"
    path.write_bytes(encode(SignedBytes(canonical_json(made), None)))
    certificate, _ = read_certificate(path)
    assert (certificate.predicate.form, certificate.predicate.launcher) == (form, launcher)
    assert str(certificate.predicate.place) == word
    made["predicate"]["in"] = "moon"
    path.write_bytes(encode(SignedBytes(canonical_json(made), None)))
    with pytest.raises(CertificateRefusedError, match="is refused") as caught:
        read_certificate(path)
    assert "'moon' is none of sqsh" in caught.value.why


def test_nodes_of_a_run_over_several_are_shown_and_that_of_one_is_not():
    gpus = machine()["gpus"]
    one, two = ({"node": node, "host": f"h100-{node}", "gpus": gpus, "image": SHA["sqsh"]} for node in range(2))
    of_two = Certificate.model_validate(statement(measured=measured(nodes=[one, two])))
    shown = [line for line in lines(of_two, None) if line.startswith("node ")]
    assert [line.split(None, 2)[2] for line in shown] == [
        f"h100-{node}, 2 x NVIDIA H200, driver 580.82.07, {SHA['sqsh']}" for node in range(2)
    ]
    page = page_html(report_of(of_two, name="n", logs={}))
    assert '<th scope="row">1</th><td data-label="host">h100-1</td><td data-label="GPUs">2 x NVIDIA H200</td>' in page
    of_one = Certificate.model_validate(statement(measured=measured(nodes=[one])))
    assert not [line for line in lines(of_one, None) if line.startswith("node ")]
    assert "<h2>Nodes</h2>" not in page_html(report_of(of_one, name="n", logs={}))
