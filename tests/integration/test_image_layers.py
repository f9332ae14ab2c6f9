"""Layers of an environment: only changed layers are new, and a write into another layer is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.git_repos import Content, History
from helpers.layer_tars import read_members
from helpers.stack_files import write_stack
from helpers.upstreams import SETUPTOOLS, project_files

from envbuild.image.layers.sandbox import VENV

# A module that no package has: the stack adds it.
ADDED = "added_by_the_stack"
STACK = "layered"
URL = "https://git.example/team/moving"
REFUSED = 5
BEFORE, AFTER = ("2025-03-01T00:00:00Z", "2025-04-01T00:00:00Z")
# A build that writes into a file of another package, in place, as setup.py scripts are able to.
# It is built in isolation, and its code runs in the sandbox all the same.
RUDE = f"""
from pathlib import Path
from setuptools import setup
for file in Path("{VENV}/lib").glob("python*/site-packages/iniconfig/__init__.py"):
    with file.open("a") as stream:
        stream.write("# mine")
setup()
"""


def moving_files(version: str) -> dict[str, Content]:
    return project_files("moving", version, "moving", ("iniconfig==2.0.0", "psutil==7.0.0"))


@pytest.fixture
def history(tmp_path: Path) -> History:
    (tmp_path / "served/team").mkdir(parents=True)
    repository = History(tmp_path / "served/team/moving")
    repository.commit("main", BEFORE, moving_files("1.0"))
    return repository


@pytest.fixture
def layered(tmp_path: Path, mini_cache: Path, history: History) -> Tool:
    """A stack with a component from git, in a store of its own that has the session's bases."""
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[url "file://{tmp_path}/served/"]\n\tinsteadOf = https://git.example/\n[protocol "file"]\n\tallow = always\n'
    )
    components: dict[str, Mapping[str, Any]] = {
        "moving": {"git": URL, "ref": "main", "modules": ["moving", "psutil"]},
        "packaging": {"version": "==25.0", "modules": ["packaging.version", ADDED]},
    }
    more = {
        "requirements": {"setuptools": SETUPTOOLS},
        "files": {f"{ADDED}.py": {"text": "a = 1\n", "reason": "a test's"}},
    }
    write_stack(tmp_path / "p", STACK, components, base="debian12", anchor="moving", **more)
    tool = store_of(Tool(tmp_path / "p", tmp_path), tmp_path / "store", mini_cache)
    tool.env |= {"GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    tool.run("lock", "--stack", STACK, "--target", "cpu")
    return tool


def store_of(tool: Tool, folder: Path, mini_cache: Path) -> Tool:
    """The same tool with a store of its own, whose bases are the session's."""
    folder.mkdir()
    (folder / "bases").symlink_to(mini_cache / "bases")
    return Tool(tool.project, folder, dict(tool.env))


def image(tool: Tool, out: str) -> dict[str, Any]:
    done = tool.run("image", "--stack", STACK, "--target", "cpu", "--format", "oci", "--json", "--out-dir", out)
    result: dict[str, Any] = json.loads(done.stdout)
    return {"path": Path(result["path"]), "steps": done.stderr, **result["record"]}


def digests(record: dict[str, Any]) -> dict[str, str]:
    return {layer["name"]: layer["digest"] for layer in record["layers"]}


def files(record: dict[str, Any], layer: str) -> dict[str, bytes]:
    blob = record["path"] / "oci/blobs/sha256" / digests(record)[layer].removeprefix("sha256:")
    return {member.name: content.read() for member, content in read_members(blob) if content}


@pytest.mark.slow
def test_a_commit_that_moves_makes_the_last_layers_anew_and_no_other(
    layered: Tool, history: History, mini_cache: Path, tmp_path: Path
) -> None:
    first = image(layered, "first")
    assert list(digests(first)) == ["base", "python", "slow", "fast", "components", "configuration"]
    assert files(first, "configuration")[f"opt/envbuild/venv/lib/python3.11/site-packages/{ADDED}.py"] == b"a = 1\n"
    commit = history.commit("main", AFTER, moving_files("2.0"))
    layered.run("lock", "--stack", STACK, "--target", "cpu", "--upgrade")
    second = image(layered, "second")
    old, new = digests(first), digests(second)
    assert {name for name in new if new[name] != old[name]} == {"components", "configuration"}
    assert second["packages"]["moving"] == "2.0"
    assert [line for line in second["steps"].splitlines() if "install" in line and line.startswith("* ")] == [
        "* install phase main, layer components: 1 packages ...",
        "* install phase git, layer components: 1 packages ...",
    ]
    # Nothing of this machine, and the commit it is from.
    content = files(second, "components")
    direct = next(data for name, data in content.items() if name.endswith("moving-2.0.dist-info/direct_url.json"))
    assert json.loads(direct) == {
        "url": URL,
        "vcs_info": {"vcs": "git", "requested_revision": commit, "commit_id": commit},
    }
    assert not [name for name, data in content.items() if b"/run/envbuild" in data or str(tmp_path).encode() in data]
    # All at once, from nothing, elsewhere, with another umask: the same bytes.
    other = store_of(layered, tmp_path / "some where else", mini_cache)
    other.env["UV_CACHE_DIR"] = str(tmp_path / "uv")
    old_umask = os.umask(0o077)
    try:
        again = image(other, "again")
    finally:
        os.umask(old_umask)
    assert digests(again) == new
    assert again["oci_digest"] == second["oci_digest"]


@pytest.mark.slow
def test_a_build_that_writes_into_another_layer_is_refused(layered: Tool, history: History) -> None:
    image(layered, "first")
    project = {**moving_files("2.0"), "setup.py": RUDE}
    history.commit("main", AFTER, project)
    layered.run("lock", "--stack", STACK, "--target", "cpu", "--upgrade")
    done = layered.run("image", "--stack", STACK, "--target", "cpu", "--format", "oci", status=REFUSED)
    assert "the installation of a package changed layer fast" in done.stderr
    assert "site-packages/iniconfig/__init__.py was written into" in done.stderr


@pytest.mark.slow
def test_an_unpacked_layer_that_is_gone_is_made_again(layered: Tool, history: History) -> None:
    first = image(layered, "first")
    trees = list((layered.cache / "layers").glob("*/rootfs"))
    assert len(trees) == 4
    for tree in trees:
        shutil.rmtree(tree)
    history.commit("main", AFTER, moving_files("2.0"))
    layered.run("lock", "--stack", STACK, "--target", "cpu", "--upgrade")
    old, new = digests(first), digests(image(layered, "second"))
    assert {name for name in new if new[name] != old[name]} == {"components", "configuration"}
