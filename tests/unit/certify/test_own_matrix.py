"""A matrix of a project's own, under the name of one that envbuild ships: every reader of a certificate sees it."""

import json
import shutil

import pytest
from helpers.certify_world import statement_of

from envbuild.catalog.catalog import Catalog, digest_without_summary
from envbuild.catalog.data import data_root
from envbuild.certify.certificate.keys import make_keys
from envbuild.cli.main import run

SHIPPED = data_root() / "envs/matrices/certify-quick.toml"
OWN = "a matrix of the project's own under the name certify-quick"


@pytest.fixture
def matrix(world):
    """The file of the project's own matrix; a copy of the shipped one."""
    path = world.project / "envs/matrices/certify-quick.toml"
    path.parent.mkdir(parents=True)
    shutil.copyfile(SHIPPED, path)
    return path


@pytest.fixture
def output_of(world, monkeypatch, capsys):
    """Runs a command in the project; what it prints."""
    monkeypatch.chdir(world.project)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(world.project / "cache"))
    keys = make_keys(world.project / "keys", "lab", None)
    (world.project / "trust.toml").write_text('[keys.lab]\nfile = "keys/lab.pub"\n')

    def command(*words):
        if words[0] == "certify":
            words += ("--stack", "mcore", "--target", "cpu", "--base", "debian12", "--key", str(keys.private))
        assert run([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return command


def weaken(path):
    path.write_text(path.read_text().replace("loss_relative = 1e-5", "loss_relative = 1e-3"))


def shown_and_verified(output_of, certificate):
    """What show and verify print, for people and as JSON."""
    verify = ("certificate", "verify", certificate, "--trust", "trust.toml")
    texts = output_of("certificate", "show", certificate), output_of(*verify)
    answer = json.loads(output_of(*verify, "--json"))
    shown = json.loads(output_of("certificate", "show", certificate, "--json"))["statement"]["predicate"]
    keys = ("matrix", "matrix_digest", "matrix_is_shipped")
    assert [answer[key] for key in keys] == [shown[key] for key in keys]
    return texts, answer


def test_certificate_names_the_projects_own_matrix(world, matrix, output_of):
    weaken(matrix)
    text = output_of("certify")
    assert f"the cases are those of {OWN}" in text
    answer = json.loads(output_of("certify", "--json"))
    own = Catalog.open(world.project).matrix("certify-quick")
    expected = {"matrix": "certify-quick", "matrix_digest": digest_without_summary(own), "matrix_is_shipped": False}
    assert {key: answer[key] for key in expected} == expected
    assert expected.items() <= statement_of(world.certificates()[0])["predicate"].items()
    texts, verified = shown_and_verified(output_of, answer["certificate"])
    assert f"{OWN}, the whole matrix" in texts[0]
    assert digest_without_summary(own) in texts[0]
    assert f"passed {OWN} (" in texts[1]
    assert expected.items() <= verified.items()
    assert (
        "the project&#39;s own under the name certify-quick"
        in (world.certificates()[0].parent / "report.html").read_text()
    )


def test_shipped_matrix_is_not_called_the_projects_own(world, output_of):
    assert "project's own" not in output_of("certify")
    answer = json.loads(output_of("certify", "--json"))
    assert (answer["matrix_is_shipped"], answer["matrix_digest"]) == (
        True,
        digest_without_summary(world.selection.catalog.matrix("certify-quick")),
    )
    texts, verified = shown_and_verified(output_of, answer["certificate"])
    assert verified["matrix_is_shipped"] is True
    assert not any("project's own" in text for text in texts)
    assert "project" not in (world.certificates()[0].parent / "report.html").read_text()


def test_matrix_of_another_name_is_the_projects_own(world, matrix, output_of):
    # One that trains and allows the same under the name is the shipped one.
    matrix.write_text("# Ours.\n" + matrix.read_text().replace('summary = "', 'summary = "ours: '))
    assert json.loads(output_of("certify", "--json"))["matrix_is_shipped"] is True
    matrix.rename(matrix.with_name("mine.toml"))
    assert "a matrix of the project's own under the name mine" in output_of("certify", "--matrix", "mine")


def test_certificate_of_a_matrix_that_was_defined_otherwise_does_not_count(world, matrix, output_of):
    """Also where the cases of this target are the same, so that the key is."""
    output_of("certify")
    matrix.write_text(matrix.read_text() + '\n[[cases]]\nmodel = "gpt"\ndata = 4\ndevices = ["cuda"]\n')
    answer = json.loads(output_of("certify", "--json"))
    assert "its matrix certify-quick had another definition (sha256:" in answer["not_counted"]
    assert (answer["written"], answer["matrix_is_shipped"]) == (True, False)
    assert len(world.certificates()) == 1
    assert json.loads(output_of("certify", "--json"))["written"] is False


def test_digest_of_a_matrix_is_that_of_all_that_decides(tmp_path):
    matrix = tmp_path / "envs/matrices/certify-quick.toml"
    matrix.parent.mkdir(parents=True)
    catalog, text = Catalog.open(tmp_path), SHIPPED.read_text()
    digests = set()
    for old, new in (
        ("", ""),
        ("steps = 5", "steps = 1"),
        ("loss_relative = 1e-5", "loss_relative = 1e-3"),
        ("hidden_size = 64", "hidden_size = 32"),
        ("[[cases]]", '[[cases]]\nmodel = "gpt"\ndata = 8\n\n[[cases]]'),
        ("time_limit_seconds = 300", "time_limit_seconds = 301"),
    ):
        assert old in text
        matrix.write_text(text.replace(old, new, 1))
        digests.add(digest_without_summary(catalog.matrix("certify-quick")))
        assert catalog.ships("matrices", "certify-quick") is not bool(old)
    assert len(digests) == 6
