"""What `list` says of images and bases, and `image resolve`."""

import json

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.cli.main import run
from envbuild.core.errors import CheckRefusedError


def test_list_shows_the_state_of_each_stack_base_and_target(project, capsys):
    record = project / "out/images/mcore-debian12-cu130-h200/record.json"
    record.parent.mkdir(parents=True)
    lock = (data_root() / "lockfiles/mcore/debian12-cu130/stack.lock.toml").read_text()
    digest = lock.partition('digest = "')[2].partition('"')[0]
    for text, state in (
        (f'{{"lock_digest": "{digest}"}}', "built"),
        ('{"lock_digest": "x"}', "built from another lock"),
    ):
        record.write_text(text)
        assert run(["list", "stacks", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["stacks"]}
        states = rows["mcore"]["states"]
        assert states["h200"]["debian12-cu130"] == state
        assert states["h100"]["debian12-cu130"] == "locked, never built"
        assert states["gb200"]["ubuntu2404-cu130-arm64"] == "locked, never built"
        assert states["cpu"]["ubuntu2204"] == "not locked"
    record.write_text("{")
    assert run(["list", "stacks"]) == 0
    assert "h200 on debian12-cu130, ubuntu2404-cu130: locked, never built" in capsys.readouterr().out


def test_list_names_the_command_that_resolves_a_base(project, capsys):
    assert run(["list", "bases"]) == 0
    message = capsys.readouterr().out
    assert "digest not resolved (envbuild image resolve --base ngc-pytorch-25.09-py3)" in message
    assert run(["list", "bases", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["bases"]}
    never_built = {name for name, row in rows.items() if row["never_built"]}
    assert {"ubuntu2404-cu130", "ubuntu2204-cu126"} <= never_built
    assert not never_built & {"debian12", "debian12-cu130", "debian13-cu130"}
    assert message.count("  locked, never built\n") == len(never_built)
    assert (rows["debian12"]["resolved"], rows["ngc-pytorch-25.09-py3"]["resolved"]) == (True, False)
    assert rows["ngc-pytorch-25.09-py3"]["digest"] is None


def test_resolving_writes_into_the_projects_own_file(project, capsys):
    shipped = Catalog.open(data_root()).path("bases", "debian12").read_text()
    file = project / "envs/bases/own.toml"
    file.parent.mkdir(parents=True)
    obtain = '[obtain]  # kept\nmethod = "tar"\npath = "root.tar"\nformat = "rootfs"\n'
    file.write_text(shipped[: shipped.index("[obtain]")] + obtain)
    (project / "root.tar").write_bytes(b"x")
    assert run(["image", "resolve", "--base", "own", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["was"], output["written"]) == (None, None)
    assert "digest" not in file.read_text()
    assert run(["image", "resolve", "--base", "own", "--write"]) == 0
    assert f'digest = "{output["digest"]}"' in file.read_text()
    assert "# kept" in file.read_text()
    assert run(["image", "resolve", "--base", "own", "--write", "--json"]) == 0
    capsys.readouterr()
    (project / "root.tar").unlink()
    assert run(["image", "resolve", "--base", "own"]) == 3
    assert run(["image", "resolve", "--base", "debian12"]) == 2
    assert "mmdebstrap" in capsys.readouterr().err


def test_unresolved_base_is_refused_with_the_command():
    definition = Catalog.open(data_root()).base("ngc-pytorch-25.09-py3")
    with pytest.raises(CheckRefusedError) as caught:
        definition.refuse_unresolved("ngc")
    assert "envbuild image resolve --base ngc" in caught.value.fix
