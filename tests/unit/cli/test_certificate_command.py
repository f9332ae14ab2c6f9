"""`envbuild certificate` from the command line: a key, what a certificate says, and whether it counts."""

import json
import re
import stat
from datetime import datetime, timedelta, timezone

import pytest
from helpers.certificates import SHA, case_of, statement

from envbuild.catalog.data import data_root
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.sign import load_signer, write_certificate
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.cli.main import run

CASES = [case_of("gpt-fp32-baseline"), case_of("gpt-fp32-tp2")]
DOC = (data_root() / "docs" / "reference" / "certificate.md").read_text()


@pytest.fixture
def certificate_json(capsys):
    """What a command prints with --json; its exit code must be this."""

    def command(*arguments, status=0):
        assert run(["certificate", *arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return command


@pytest.fixture
def signed(project, certificate_json):
    """A key of the name `lab`, a trust file with it, and a certificate that it signed."""
    certificate_json("keygen", "--out", "keys", "--name", "lab")
    write_certificate(project / CERTIFICATE_FILE, statement(cases=CASES), load_signer("keys/lab.key", None))
    (project / "trust.toml").write_text('[keys.lab]\nfile = "keys/lab.pub"\n')
    return project


def test_keygen_makes_a_pair_and_overwrites_none(project, certificate_json, capsys):
    made = certificate_json("keygen", "--out", "keys", "--name", "lab")
    assert made == {
        "private": str(project / "keys/lab.key"), "public": str(project / "keys/lab.pub"), "keyid": made["keyid"],
    }  # fmt: skip
    assert re.fullmatch("[0-9a-f]{64}", made["keyid"])
    assert stat.S_IMODE((project / "keys/lab.key").stat().st_mode) == 0o600
    before = (project / "keys/lab.key").read_bytes()
    error = certificate_json("keygen", "--out", "keys", "--name", "lab", status=2)["error"]
    assert "exists already" in error["what"]
    assert (project / "keys/lab.key").read_bytes() == before
    assert run(["certificate", "keygen", "--out", "keys", "--name", "../lab"]) == 2
    assert run(["certificate", "keygen", "--out", "more", "--password", "word"]) == 3
    assert "word" not in capsys.readouterr().err.replace("password", "")
    assert not (project / "more").exists()


def test_keygen_locks_with_a_password_that_is_named(project, certificate_json, monkeypatch):
    monkeypatch.setenv("WORD", "s3cret")
    certificate_json("keygen", "--out", "keys", "--name", "lab", "--password", "env:WORD")
    assert "ENCRYPTED PRIVATE KEY" in (project / "keys/lab.key").read_text()
    assert load_signer("keys/lab.key", "env:WORD")


def test_show_prints_the_certificate_and_that_nothing_was_verified(signed, certificate_json, capsys):
    shown = certificate_json("show", CERTIFICATE_FILE)
    assert shown["verified"] is False
    assert shown["statement"]["predicate"]["cases"] == CASES
    assert run(["certificate", "show", CERTIFICATE_FILE]) == 0
    text = capsys.readouterr().out
    assert "not verified here" in text
    assert shown["keyid"] in text
    assert "gpt-fp32-tp2" in text
    write_certificate(signed / "unsigned", statement(cases=CASES), None)
    assert run(["certificate", "show", "unsigned"]) == 0
    out, message = capsys.readouterr()
    assert "NOT SIGNED" in out
    assert "not signed" in message


def test_show_of_what_is_no_certificate(project, certificate_json):
    assert certificate_json("show", "none", status=3)["error"]["what"] == "there is no certificate none"
    (project / "other").write_text("{}")
    assert certificate_json("show", "other", status=12)["error"]["kind"] == "CertificateRefusedError"


def test_verify_prints_the_key_and_the_subject(signed, certificate_json, capsys):
    printed = certificate_json("verify", CERTIFICATE_FILE, "--trust", "trust.toml", "--digest", SHA["oci"])
    assert printed["verified"] is True
    assert printed["key"]["name"] == "lab"
    assert printed["subject"]["mcore-ubuntu2404-cu130-h200.sqsh"] == SHA["sqsh"]
    assert (printed["cases"], printed["whole_matrix"]) == (2, True)
    assert len(printed["compared"]) == 1
    assert run(["certificate", "verify", CERTIFICATE_FILE, "--trust", "trust.toml"]) == 0
    text = capsys.readouterr().out
    assert "verified: signed by lab" in text
    assert "run in sqsh with 2 x NVIDIA H200" in text
    assert "nothing was compared" in text


def test_verify_refuses_with_an_exit_code_of_its_own(signed, certificate_json):
    def refused(*arguments):
        error = certificate_json("verify", *arguments, "--trust", "trust.toml", status=12)["error"]
        assert (error["kind"], error["exit_code"]) == ("CertificateRefusedError", 12)
        return error["why"]

    assert "another one" in refused(CERTIFICATE_FILE, "--digest", SHA["lock"])
    (signed / "image.sqsh").write_bytes(b"another image")
    assert "another one" in refused(CERTIFICATE_FILE, "--image", "image.sqsh")
    before = (datetime.now(timezone.utc) - timedelta(days=1)).strftime(MOMENT_FORMAT)
    assert "after the moment" in refused(CERTIFICATE_FILE, "--at", before)
    assert "Its oldest numbers" in refused(CERTIFICATE_FILE, "--max-age", "1h")
    data = (signed / CERTIFICATE_FILE).read_bytes()
    (signed / "changed").write_bytes(data.replace(b"A", b"B", 1))
    refused("changed")


def test_missing_trust_file_shows_the_lines_that_make_one(signed, certificate_json):
    error = certificate_json("verify", CERTIFICATE_FILE, "--trust", "none/mine.toml", status=3)["error"]
    assert error["what"] == "the trust file none/mine.toml does not exist"
    assert error["why"]
    lines = "\n".join(error["fix"].splitlines()[-2:])
    (signed / "mine.toml").write_text(lines)
    (signed / "lab.pub").write_bytes((signed / "keys/lab.pub").read_bytes())
    certificate_json("verify", CERTIFICATE_FILE, "--trust", "mine.toml")


def test_trust_is_named_on_the_command_line_or_in_the_configuration_and_nowhere_else(
    signed, certificate_json, monkeypatch
):
    assert "no trusted keys" in certificate_json("verify", CERTIFICATE_FILE, status=2)["error"]["what"]
    monkeypatch.setenv("ENVBUILD_TRUST", str(signed / "trust.toml"))
    assert certificate_json("verify", CERTIFICATE_FILE)["verified"]
    monkeypatch.delenv("ENVBUILD_TRUST")
    (signed / ".config/envbuild").mkdir(parents=True)
    (signed / ".config/envbuild/config.toml").write_text('[signing]\ntrust = "~/trust.toml"\n')
    assert certificate_json("verify", CERTIFICATE_FILE)["verified"]
    # The command line's word goes before the configuration's.
    certificate_json("keygen", "--out", "keys", "--name", "other")
    (signed / "other.toml").write_text('[keys.other]\nfile = "keys/other.pub"\n')
    certificate_json("verify", CERTIFICATE_FILE, "--trust", "other.toml", status=12)


@pytest.mark.parametrize(
    "arguments",
    [("--at", "yesterday"), ("--max-age", "1y"), ("--max-age", "-1d"), ("--digest", "sha256:12"), ("--trust", "")],
)
def test_option_that_means_nothing_is_refused(signed, arguments):
    assert run(["certificate", "verify", CERTIFICATE_FILE, *arguments]) == 2


@pytest.mark.parametrize("name", ["keygen", "show", "verify"])
def test_page_names_every_option_and_no_other(name, capsys):
    assert run(["certificate", name, "--help"]) == 0
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out.split("Options:")[1]))
    section = next(part for part in DOC.split("\n## ") if part.startswith(f"{name}\n"))
    named = set(re.findall(r"(?:^|[`\[| ])(--[a-z][a-z-]*)", section)) - {"--key", "--in"}
    general = {"--help", "--json", "--quiet"}
    assert options - general == named - general


KEYS = {
    "verified",
    "at",
    "key",
    "subject",
    "stack",
    "base",
    "target",
    "form",
    "launcher",
    "lock_digest",
    "matrix",
    "matrix_digest",
}
KEYS |= {"matrix_is_shipped", "whole_matrix", "cases", "issued_at", "oldest_measurement", "compared"}
KEYS |= {"gpus", "not_vouched"}


def test_keys_of_json_stay(signed, certificate_json):
    assert set(certificate_json("verify", CERTIFICATE_FILE, "--trust", "trust.toml")) == KEYS
