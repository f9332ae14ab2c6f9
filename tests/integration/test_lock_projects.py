"""`envbuild lock --project`: what a uv project's uv.lock says is what is locked, installed and exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.build_backend import BACKEND
from helpers.lock_runs import ANY, OLD, error, lock_of, result
from helpers.simple_index import SimpleIndex, simple_index
from helpers.stack_files import BASE, write_base
from helpers.upstreams import PUBLIC
from helpers.uv_projects import UvProject, dist_infos
from helpers.wheels import make_wheel

from envbuild.core import tomlread
from envbuild.lock.uv.program import uv_program

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


@pytest.mark.parametrize("in_git", [True, False])
def test_what_envbuild_writes_in_the_project_s_own_folder_is_no_part_of_the_project(
    own: Any, app: UvProject, in_git: bool
) -> None:
    here = replace(own, project=app.folder)
    write_base(app.folder)
    # As setuptools does where several folders could be the package.
    refusal = "\nimport os\nassert not {'lockfiles', 'out'} & {*os.listdir()} and not os.path.exists('envs/bases')\n"
    app.write({"backend.py": BACKEND + refusal, "envs/training.py": "", "out/image": ""})
    commit = app.locked() if in_git else app.uv("lock")
    if not in_git:
        shutil.rmtree(app.folder / ".git")
    words = ("lock", "--project", ".", "--base", BASE, "--target", "cpu", "--json")
    assert result(here.run(*words))["built"] is True
    record = lock_of(here, "app").project
    assert record is not None
    assert (record.commit, record.dirty) == (commit or None, False)
    assert result(here.run(*words))["built"] is False
    if in_git:
        app.commit()  # the lock itself
    assert result(here.run(*words))["built"] is False
    app.write({"envs/training.py": "steps = 1"})
    assert result(here.run(*words))["built"] is in_git


def test_what_the_project_s_own_packages_have_at_the_top_must_import(own: Any, app: UvProject) -> None:
    app.write({"member/tests/__init__.py": "", "packages/member/member/__init__.py": "import not_declared\n"})
    app.locked()
    locked(own, "--extra", "two")
    modules = {name: part.modules for name, part in lock_of(own, "app").components.items()}
    assert modules == {"app": ("app",), "member": ("member",), "beside": ("beside",)}
    refused = own.run("sync", "--stack", "app", "--base", BASE, "--into", "venv", "--json", status=None)
    assert "No module named 'not_declared'" in error(refused)["why"]
    assert "Add what is missing to the project's pyproject.toml" in error(refused)["fix"]
    # Others, or none, can be named.
    stack = own.project / "envs/stacks/app.toml"
    stack.write_text(stack.read_text().replace("[project]", '[project]\nimports = ["beside"]'))
    result(own.run("lock", "--stack", "app", "--base", BASE, "--json"))
    assert installed(own).keys() == {"app", "member", "beside", "lib", "choice"}
    locked(own, "--extra", "two")


def test_a_project_without_anything_for_cuda_is_for_the_cpu_first(own: Any, app: UvProject) -> None:
    app.locked()
    done = result(own.run("lock", "--project", "../app", "--json"))
    assert done["base"] == "debian12"
    stack = tomlread.loads((own.project / "envs/stacks/app.toml").read_text())
    targets = [entry["target"] for entry in stack["builds"]]
    assert targets[0] == "cpu"
    assert "h200" in targets
    refused = own.run("lock", "--stack", "app", "--upgrade", "--json", status=2)
    assert "`uv lock --upgrade`" in error(refused)["fix"]


def test_a_uv_lock_that_is_older_than_its_pyproject_is_refused(own: Any, app: UvProject) -> None:
    app.locked()
    text = (app.folder / "pyproject.toml").read_text()
    (app.folder / "pyproject.toml").write_text(text.replace('"tester"', '"tester<1"'))
    refused = error(own.run(*LOCK, "--group", "test", status=3))
    assert "does not match its pyproject.toml" in refused["what"]
    assert f"uv lock` in {app.folder}" in refused["fix"]


def test_a_package_of_the_project_that_does_not_build_is_refused_with_the_command_to_try(
    own: Any, app: UvProject
) -> None:
    app.locked()
    app.write({"packages/member/backend.py": "raise RuntimeError('no compiler')"})
    refused = json.loads(own.run(*LOCK, status=4).stdout)["error"]  # with the build's own traceback
    assert "no compiler" in refused["why"]
    assert refused["fix"] == f"Correct it: `uv build --wheel` in {app.folder}/packages/member must succeed."


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
        [uv_program(), *words, "--python", str(own.project / "plain/bin/python")],
        cwd=folder,
        env=app.env,
        check=True,
    )
    assert dist_infos(own.project / "plain") == installed(own)


@pytest.fixture
def other_index() -> Iterator[SimpleIndex]:
    with simple_index() as running:
        yield running


@pytest.fixture
def from_git(own: Any, app: UvProject, tmp_path: Path) -> str:
    """A repository with a package in a folder, under an address that does not exist; its commit."""
    settings = tmp_path / "gitconfig"
    settings.write_text(f'[url "file://{tmp_path}/"]\n\tinsteadOf = {PUBLIC}/\n[protocol "file"]\n\tallow = always\n')
    variables = {"GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    own.env |= variables
    app.env = {**app.env, **variables}
    repository = UvProject(tmp_path / "kernels", app.env)
    repository.package("python", "kernels", "3.0")
    repository.package("late", "late", "3.1")
    return repository.commit()


def with_everything(app: UvProject, other: SimpleIndex, folder: Path, commit: str) -> None:
    """The application with packages from git, of an index of its own, and built without isolation."""
    other.add(make_wheel(folder, "special", "5.0", ANY), OLD)
    text = (app.folder / "pyproject.toml").read_text()
    text = text.replace('"lib"]', '"lib", "kernels", "late", "special"]')
    text = text.replace("[tool.uv]\n", '[tool.uv]\nno-build-isolation-package = ["late"]\n')
    text += (
        f'kernels = {{ git = "{PUBLIC}/kernels", rev = "{commit}", subdirectory = "python" }}\n'
        f'late = {{ git = "{PUBLIC}/kernels", rev = "{commit}", subdirectory = "late" }}\n'
        'special = { index = "own" }\n'
        f'[[tool.uv.index]]\nname = "own"\nurl = "{other.url}"\nexplicit = true\n'
    )
    (app.folder / "pyproject.toml").write_text(text)
    app.locked()


@pytest.mark.slow
def test_git_an_index_of_its_own_and_no_isolation(
    own: Any, app: UvProject, other_index: SimpleIndex, tmp_path: Path, from_git: str
) -> None:
    with_everything(app, other_index, tmp_path / "others", from_git)
    done = locked(own)
    assert done["packages"] == {"main": 5, "compile": 0, "git": 2}
    record = lock_of(own, "app")
    kernels, late = record.components["kernels"], record.components["late"]
    assert (kernels.commit, kernels.subdirectory, kernels.phase.value) == (from_git, "python", "main")
    assert (late.version, late.phase.value) == ("3.1", "compile")
    assert record.components["special"].index == "own"
    folder = own.project / "lockfiles/app" / BASE
    committed = [path for path in folder.iterdir() if path.is_file() and path.name != "uv.lock"]
    assert not [path.name for path in committed if "127.0.0.1" in path.read_text()]
    app.uv("sync", "--frozen", "--no-editable")
    assert installed(own) == dist_infos(app.folder / ".venv")
    # A mirror of the site's comes before the address of the project.
    (tmp_path / "config.toml").write_text('[indexes]\nown = "http://127.0.0.1:1/simple"\n')
    own.env |= {"ENVBUILD_CONFIG": str(tmp_path / "config.toml"), "UV_CACHE_DIR": str(tmp_path / "cold")}
    refused = error(own.run("sync", "--stack", "app", "--base", BASE, "--into", "venv", "--json", status=10))
    assert "127.0.0.1:1" in refused["why"]


def test_a_repository_that_cannot_be_reached_keeps_no_lock_from_being_made(
    own: Any, app: UvProject, other_index: SimpleIndex, tmp_path: Path, from_git: str
) -> None:
    with_everything(app, other_index, tmp_path / "others", from_git)
    (tmp_path / "kernels").rename(tmp_path / "gone")
    done = own.run(*LOCK)
    assert "not checked, for their repositories cannot be reached: kernels, late" in done.stderr
    kernels = lock_of(own, "app").components["kernels"]
    assert (kernels.commit, kernels.committed_at) == (from_git, None)


def test_an_altered_hash_is_refused(own: Any, app: UvProject) -> None:
    app.locked()
    file = app.folder / "uv.lock"
    digests = re.findall(r'lib-1.0-py3-none-any.whl", hash = "sha256:(\w+)"', file.read_text())
    file.write_text(file.read_text().replace(digests[0], "0" * 64))
    locked(own)
    assert lock_of(own, "app").project.dirty  # type: ignore[union-attr]
    refused = error(own.run("sync", "--stack", "app", "--base", BASE, "--into", "venv", "--json", status=6))
    assert "Hash mismatch" in refused["why"]


def test_a_commit_of_a_repository_is_locked_and_followed(own: Any, app: UvProject) -> None:
    (app.folder / ".gitignore").write_text("uv.lock\n__pycache__\n")
    first = app.locked()
    url = f"file://{app.folder}"
    own.env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}
    command = ("lock", "--project", f"{url}@main", "--base", BASE, "--target", "cpu", "--json")
    done = own.run(*command)
    # It has no uv.lock in the repository.
    assert "lock app" in done.stderr
    assert "since it has no uv.lock" in done.stderr
    project = lock_of(own, "app").project
    assert project is not None
    assert (project.git, project.commit, project.dirty) == (url, first, False)
    assert result(own.run("lock", "--stack", "app", "--json"))["built"] is False
    app.write({"member.txt": "x"})
    second = app.commit()
    assert "moved to" in error(own.run("lock", "--check", "--json", status=5))["why"]
    assert result(own.run("lock", "--stack", "app", "--json"))["built"] is True
    assert lock_of(own, "app").project.commit == second  # type: ignore[union-attr]


def outside(app: UvProject) -> None:
    app.folder.parent.joinpath("far").mkdir()
    (app.folder / "beside").rename(app.folder.parent / "far/beside")
    replace_in(app, 'path = "beside"', 'path = "../far/beside"')
    app.locked()


def no_submodule(app: UvProject) -> None:
    app.locked()
    for path in sorted((app.folder / "beside").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def for_windows(app: UvProject) -> None:
    replace_in(app, "[tool.uv]\n", "[tool.uv]\nenvironments = [\"sys_platform == 'win32'\"]\n")
    app.locked()


def other_python(app: UvProject) -> None:
    app.locked()
    file = app.folder / "uv.lock"
    file.write_text(file.read_text().replace('requires-python = ">=3.11"', 'requires-python = ">=3.12"'))


def damaged(app: UvProject) -> None:
    (app.folder / "uv.lock").write_text("version = [")


def replace_in(app: UvProject, old: str, new: str) -> None:
    file = app.folder / "pyproject.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (outside, "beside is outside of the repository"),
        (no_submodule, "submodule"),
        (for_windows, "is not for the base's platform"),
        (other_python, "no base fits app"),
        (damaged, "cannot understand"),
    ],
)
def test_what_cannot_be_locked_is_refused(
    own: Any, app: UvProject, spoil: Callable[[UvProject], None], what: str
) -> None:
    spoil(app)
    refused = error(own.run(*LOCK, status=3))
    assert what in f"{refused['what']} {refused['why']}"
