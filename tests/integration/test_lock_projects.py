"""`envbuild lock --project`: what a uv project's uv.lock says is what is locked, installed and exported."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import error, lock_of, result
from helpers.stack_files import BASE
from helpers.uv_projects import UvProject, dist_infos

from envbuild.core import tomlread

LOCK = ("lock", "--project", "../app", "--base", BASE, "--target", "cpu", "--json")


@pytest.fixture
def app(own: Any, wheel: Callable[..., Path], tmp_path: Path) -> UvProject:
    """A workspace: an application, a member, a package in a folder; two extras that exclude each other."""
    for version in ("1.0", "2.0"):
        wheel("choice", version)
    wheel("lib", "1.0", requires=("unwanted",))
    wheel("unwanted", "1.0")
    wheel("tester", "1.0")
    project = UvProject(tmp_path / "app", own.env)
    project.package(
        ".",
        "app",
        "0.1",
        '[project.optional-dependencies]\none = ["choice==1.0"]\ntwo = ["choice==2.0"]\n'
        '[dependency-groups]\ntest = ["tester"]\n'
        '[tool.uv]\nconflicts = [[{ extra = "one" }, { extra = "two" }]]\n'
        "override-dependencies = [\"unwanted; sys_platform == 'never'\"]\n"
        '[tool.uv.workspace]\nmembers = ["packages/*"]\n'
        '[tool.uv.sources]\nmember = { workspace = true }\nbeside = { path = "beside" }\n',
        needs=("member", "beside", "lib"),
    )
    project.package("packages/member", "member", "0.2")
    project.package("beside", "beside", "0.3")
    return project


def locked(own: Any, *more: str) -> dict[str, Any]:
    return result(own.run(*LOCK, *more))


def installed(own: Any, name: str = "app") -> dict[str, str]:
    own.run("sync", "--stack", name, "--base", BASE, "--into", "venv")
    return dist_infos(own.project / "venv")


def test_a_project_is_locked_installed_and_exported_as_its_uv_lock_says(own: Any, app: UvProject) -> None:
    commit = app.locked()
    done = locked(own, "--extra", "two", "--group", "test")
    assert done["packages"] == {"main": 6, "compile": 0, "git": 0}
    record = lock_of(own, "app")
    assert record.project is not None
    assert (record.project.commit, record.project.dirty) == (commit, False)
    assert record.driver == "none"
    app.uv("sync", "--frozen", "--no-editable", "--extra", "two", "--group", "test")
    assert installed(own) == dist_infos(app.folder / ".venv")
    assert dist_infos(own.project / "venv")["choice"] == "2.0"
    # Other formats have the same, and a plain uv too.
    pylock = own.run("export", "--stack", "app", "--base", BASE, "--format", "pylock").stdout
    packages = {package["name"]: package for package in tomlread.loads(pylock)["packages"]}
    assert packages.keys() == dist_infos(own.project / "venv").keys()
    assert packages["member"]["archive"]["path"] == "wheels/member-0.2-py3-none-any.whl"
    bom = json.loads(own.run("export", "--stack", "app", "--base", BASE, "--format", "cyclonedx").stdout)
    assert {component["name"] for component in bom["components"]} == packages.keys()
    assert result(own.run(*LOCK, "--extra", "two", "--group", "test"))["built"] is False
    own.run("lock", "--check")


def test_a_uv_lock_that_is_older_than_its_pyproject_is_refused(own: Any, app: UvProject) -> None:
    app.locked()
    text = (app.folder / "pyproject.toml").read_text()
    (app.folder / "pyproject.toml").write_text(text.replace('"tester"', '"tester<1"'))
    refused = error(own.run(*LOCK, "--group", "test", status=3))
    assert "does not match its pyproject.toml" in refused["what"]
    assert f"uv lock` in {app.folder}" in refused["fix"]


def test_extras_that_exclude_each_other_are_refused(own: Any, app: UvProject) -> None:
    app.locked()
    refused = error(own.run(*LOCK, "--extra", "one", "--extra", "two", status=3))
    assert "cannot be installed with --extra one --extra two" in refused["what"]
    assert "incompatible" in refused["why"]


def test_a_changed_wheel_of_the_project_is_refused(own: Any, app: UvProject) -> None:
    app.locked()
    locked(own)
    (own.project / f"lockfiles/app/{BASE}/wheels/member-0.2-py3-none-any.whl").write_bytes(b"")
    refused = error(own.run("sync", "--stack", "app", "--base", BASE, "--into", "venv", "--json", status=5))
    assert "wheels/member-0.2-py3-none-any.whl: the record states" in refused["why"]


def test_the_plain_commands_install_the_same(own: Any, app: UvProject) -> None:
    app.locked()
    locked(own)
    folder = own.project / "lockfiles/app" / BASE
    app.uv("venv", str(own.project / "plain"))
    words = (folder / "main.txt").read_text().splitlines()[1].removeprefix("# uv ").split()
    subprocess.run(
        [*(str(word) for word in uv_words(words)), "--python", str(own.project / "plain/bin/python")],
        cwd=folder,
        env=app.env,
        check=True,
    )
    assert dist_infos(own.project / "plain") == installed(own)


def uv_words(words: list[str]) -> list[str]:
    from envbuild.lock.uv.program import uv_program

    return [str(uv_program()), *words]
