"""`envbuild publish` as people call it: what it refuses before it asks a registry."""

from __future__ import annotations

import json
import shlex

import pytest
from helpers.ledger_rows import MOMENT, publication_row
from helpers.publications import make_publication
from helpers.publish_world import make_publish_world

from envbuild.cli import publish as publish_command
from envbuild.cli.common import Session
from envbuild.cli.main import run
from envbuild.ledger.ledger import Ledger
from envbuild.publish.models import Revocation
from envbuild.publish.revoke import Revoked

DIGEST = "sha256:" + "1" * 64


@pytest.fixture
def command(project, capsys):
    world = make_publish_world(project)

    def answer(*words):
        status = run(["publish", "--json", *words])
        return status, json.loads(capsys.readouterr().out)["error"]

    answer.world = world
    return answer


IMAGE = ("--stack", "mcore", "--target", "cpu", "--base", "debian12")


@pytest.mark.parametrize(
    ("words", "status", "what"),
    [
        (("--to", "r.example/a", "--revoke", DIGEST), 2, "--revoke needs --reason"),
        (("--to", "r.example/a", "--revoke", DIGEST, "--reason", " "), 2, "--revoke needs --reason"),
        (("--to", "r.example/a", "--revoke", "sha256:1"), 2, "not a digest"),
        (("--to", "r.example/a", "--revoke", DIGEST, "--reason", "x", "--target", "cpu"), 2, "--target has no effect"),
        (("--to", "r.example/a", *IMAGE, "--no-sqsh", "--sqsh-to", "dir"), 2, "--sqsh-to has no effect"),
        (("--to", "r.example/a", *IMAGE, "--reason", "x"), 2, "--reason has no effect"),
        (("--to", "s3://bucket/a", *IMAGE, "--uncertified"), 2, "not a repository of a registry"),
        (("--to", "me:secret@r.example/a", *IMAGE, "--uncertified"), 3, "user name or password"),
        (("--to", "r.example/A", *IMAGE, "--uncertified"), 3, "not the address"),
        (("--to", "r.example/a", *IMAGE, "--policy", "lax"), 3, "there is no policy 'lax'"),
        (("--to", "r.example/a", *IMAGE), 9, "is not published"),
        (("--to", "r.example/a", *IMAGE, "--certificate", "nowhere"), 9, "is not published"),
    ],
)
def test_what_is_refused(command, words, status, what):
    code, error = command(*words)
    assert (code, what in f"{error['what']} {error['why']}") == (status, True), error
    assert "secret" not in json.dumps(error)
    assert error["why"]
    assert error["fix"]


def test_a_policy_is_read_with_its_line(command):
    folder = command.world.project / "envs" / "policies"
    folder.mkdir(parents=True)
    (folder / "own.toml").write_text('summary = "x"\nmatrices = ["certify-all"]\nmax_age_days = 1\n')
    status, error = command("--to", "r.example/a", *IMAGE, "--policy", "own")
    assert status == 3
    assert "own.toml:2" in error["what"]
    assert "certify-all" in error["what"]
    (folder / "own.toml").write_text('summary = "x"\nmatrices = ["certify-full"]\nmax_age_days = 0\n')
    status, error = command("--to", "r.example/a", *IMAGE, "--policy", "own")
    assert status == 3
    assert "own.toml:3" in error["what"]


def test_the_newest_certificate_is_taken(command):
    """It is not signed, so that it is refused for that and not for being missing."""
    command.world.certify(signed=False)
    (command.world.project / "trust.toml").write_text(f'[keys.lab]\nfile = "{command.world.key.with_suffix(".pub")}"\n')
    status, error = command("--to", "r.example/a", *IMAGE, "--trust", "trust.toml")
    assert (status, error["reason"]) == (9, "not-signed")


def test_revocation_names_the_other_repositories_of_the_image(project, capsys, monkeypatch):
    row = publication_row("a")
    image = row.oci_digest
    rows = [
        row,
        publication_row("a", repository="registry.example/other"),
        publication_row("a", repository="registry.example/third", tag="mine-cpu"),
        publication_row("a", repository="registry.example/done", revoked_at=MOMENT, revoked_reason="old"),
        publication_row("b", repository="registry.example/other"),
    ]
    monkeypatch.setattr(Session, "ledger_file", project / "ledger.sqlite")
    with Ledger.open(project / "ledger.sqlite") as ledger:
        ledger.record(*rows)
    back = Revocation(reason="it's; wrong", at=MOMENT)
    revoked = Revoked(publications=(make_publication(oci_digest=image, tag=row.tag, revoked=back),), heads={})
    monkeypatch.setattr(publish_command, "revoke", lambda *_, **__: revoked)
    words = ["publish", "--to", f"oci://{row.repository}/", "--revoke", image, "--reason", back.reason]
    assert run([*words, "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["elsewhere"]
    assert [shlex.split(command) for command in commands] == [
        ["envbuild", *words[:1], "--to", f"registry.example/{name}", *words[3:]] for name in ("other", "third")
    ]
    assert run(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"another repository has it, too: {one}" for one in commands]
