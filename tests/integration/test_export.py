"""`envbuild export`: what it writes is read back by the tools it is for, against an index of the test's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import urllib.parse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from helpers.build_backend import BACKEND, pyproject
from helpers.git_repos import History
from helpers.lock_runs import ANY, OLD
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import BASE, GPU_BASE, write_stack
from helpers.wheels import make_wheel, served, write_index
from packaging.pylock import Pylock

from envbuild.core import tomlread
from envbuild.lock.uv.program import uv_program

TORCH_TAGS = "cp311-cp311-manylinux_2_28_x86_64"
REMOTE = "https://git.example.invalid/tools/gitlib"


@pytest.fixture
def own(own: Any, tmp_path: Path) -> Any:
    """With this index alone, whatever pip's files say, and with git's URLs rewritten."""
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[url "file://{tmp_path}/served/"]\n\tinsteadOf = https://git.example.invalid/\n'
        '[protocol "file"]\n\tallow = always\n'
    )
    own.env |= {"PIP_CONFIG_FILE": "/dev/null", "GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    return own


@pytest.fixture
def two_phases(own: Any, index: SimpleIndex, wheel: Callable[..., Path], tmp_path: Path) -> Any:
    """Locked: `lib`, which needs `dep`, and the sdist `kernels`, which compiles against `dep`. As in a fresh clone."""
    components = {"lib": {}, "kernels": {"phase": "compile"}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)
    wheel("lib", "1.0", requires=("dep",))
    wheel("dep", "1.0")
    # It builds only where `dep` is installed, as extensions of torch do.
    files = {"backend.py": f"import dep\n{BACKEND}", "kernels.py": ""}
    about = pyproject("kernels", "1.0")
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("dep",), pyproject=about, files=files), OLD)
    own.run("lock", "--stack", "s")
    (lock_of(own) / "uv.lock").unlink()
    return own


def lock_of(tool: Any, base: str = GPU_BASE, name: str = "s") -> Path:
    return Path(tool.project / "lockfiles" / name / base)


def uv(tool: Any, *arguments: str | Path) -> str:
    """Run uv as somebody without envbuild does; returns what it printed."""
    done = subprocess.run([uv_program(), *arguments], env=tool.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def venv(tool: Any) -> Path:
    path = tool.project / "venv"
    uv(tool, "venv", "-q", "--clear", "--python", "/usr/bin/python3.11", path)
    return Path(path)


def installed(tool: Any, place: Path) -> dict[str, str]:
    rows = json.loads(uv(tool, "pip", "list", "-q", "--format", "json", "--python", place))
    return {row["name"]: row["version"] for row in rows}


def export(tool: Any, kind: str, *arguments: str) -> str:
    text: str = tool.run("export", "--stack", "s", "--format", kind, *arguments).stdout
    return text


def refusal(tool: Any, kind: str, *arguments: str, status: int) -> dict[str, Any]:
    done = tool.run("export", "--stack", "s", "--format", kind, "--json", *arguments, status=status)
    assert "Traceback" not in done.stderr
    refused: dict[str, Any] = json.loads(done.stdout)["error"]
    assert refused["fix"]
    return refused


def schema_errors(text: str) -> object:
    return JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)


# ---- requirements


@pytest.mark.slow
def test_requirements_install_with_the_command_at_their_head(two_phases: Any, index: SimpleIndex) -> None:
    index.requested.clear()
    two_phases.run("export", "--stack", "s", "--format", "requirements", "--output", "all.txt")
    text = (two_phases.project / "all.txt").read_text()
    assert index.requested == []
    assert index.address not in text
    command = " ".join(line[1:] for line in text.splitlines()[1:] if line.startswith("#"))
    words = shlex.split(command)
    assert words[:3] == ["uv", "pip", "install"]
    assert words[-2:] == ["-r", "FILE"]
    assert "--require-hashes" in words
    place = venv(two_phases)
    uv(two_phases, *words[1:-1], two_phases.project / "all.txt", "--python", place)
    assert installed(two_phases, place) == {"lib": "1.0", "dep": "1.0", "kernels": "1.0"}
    # Of single phases.
    assert "kernels" not in export(two_phases, "requirements", "--phases", "main")
    text = export(two_phases, "requirements", "--phases", "compile")
    assert "\nkernels==1.0" in text
    assert "\nlib" not in text
    refused = refusal(two_phases, "requirements", "--phases", "git", status=2)
    assert "has packages in main, compile" in refused["why"]
    refusal(two_phases, "requirements", "--phases", "main,wheels", status=2)


# ---- pylock.toml


def test_pylock_is_valid_and_installs_what_is_locked(two_phases: Any) -> None:
    done = two_phases.run("export", "--stack", "s", "--format", "pylock", "--output", "pylock.toml", "--json")
    printed = json.loads(done.stdout)
    assert (printed["packages"], printed["content"]) == (3, None)
    assert "names the package index" in done.stderr
    file = Path(printed["output"])
    read = Pylock.from_dict(tomlread.loads(file.read_text()))
    assert {package.name: str(package.version) for package in read.packages} == {
        "lib": "1.0",
        "dep": "1.0",
        "kernels": "1.0",
    }
    place = venv(two_phases)
    main = two_phases.project / "pylock.main.toml"
    export(two_phases, "pylock", "--phases", "main", "--output", str(main))
    uv(two_phases, "pip", "sync", main, "--python", place)
    assert installed(two_phases, place) == {"lib": "1.0", "dep": "1.0"}
    uv(two_phases, "pip", "sync", file, "--no-build-isolation", "--python", place)
    assert installed(two_phases, place) == {"lib": "1.0", "dep": "1.0", "kernels": "1.0"}


def test_pylock_is_the_same_after_the_index_gained_files(two_phases: Any, wheel: Callable[..., Path]) -> None:
    before = export(two_phases, "pylock")
    wheel("lib", "1.1", "2099-01-01T00:00:00Z")
    wheel("lib", "1.0", "2099-01-01T00:00:00Z", tags="cp311-cp311-manylinux_2_28_x86_64", requires=("dep",))
    two_phases.env["UV_CACHE_DIR"] += "-new"
    assert export(two_phases, "pylock") == before


@pytest.mark.parametrize("kind", ["pylock", "cyclonedx"])
def test_an_index_that_serves_another_file_is_found_out(
    two_phases: Any, index: SimpleIndex, tmp_path: Path, kind: str
) -> None:
    changed = tmp_path / "wheels" / f"dep-1.0-{ANY}.whl"
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("dep/evil.py", "")
    index.add(changed, OLD)
    two_phases.env["UV_CACHE_DIR"] += "-new"
    refused = refusal(two_phases, kind, "--output", "pylock.toml", status=5)
    assert "dep 1.0: a file with sha256:" in refused["why"]
    assert not (two_phases.project / "pylock.toml").exists()


# ---- CycloneDX


def test_cyclonedx_is_valid_complete_and_host_free(two_phases: Any, index: SimpleIndex) -> None:
    text = export(two_phases, "cyclonedx")
    assert schema_errors(text) is None
    document = json.loads(text)
    assert index.address not in text
    assert {item["name"]: item["purl"] for item in document["components"]} == {
        "lib": "pkg:pypi/lib@1.0",
        "dep": "pkg:pypi/dep@1.0",
        "kernels": "pkg:pypi/kernels@1.0",
    }
    files = [file for item in document["components"] for file in item["externalReferences"]]
    assert sorted(file["url"] for file in files) == [f"dep-1.0-{ANY}.whl", "kernels-1.0.tar.gz", f"lib-1.0-{ANY}.whl"]
    locked = (lock_of(two_phases) / "main.txt").read_text() + (lock_of(two_phases) / "compile.txt").read_text()
    assert all(f"sha256:{file['hashes'][0]['content']}" in locked for file in files)
    graph = {item["ref"].split("-")[0]: item.get("dependsOn", []) for item in document["dependencies"]}
    assert [ref.split("-")[0] for ref in graph["lib"]] == ["dep"]
    assert document["metadata"]["component"]["name"] == "s"
    main = json.loads(export(two_phases, "cyclonedx", "--phases", "main"))
    assert {item["name"] for item in main["components"]} == {"lib", "dep"}
    assert main["serialNumber"] != document["serialNumber"]


def test_cyclonedx_is_the_same_with_and_without_a_uv_lock(two_phases: Any, index: SimpleIndex) -> None:
    fresh = export(two_phases, "cyclonedx")
    assert not (lock_of(two_phases) / "uv.lock").exists(), "the lock directory is left as it is"
    two_phases.run("lock", "--stack", "s", "--upgrade")
    two_phases.run("lock", "--check")
    index.requested.clear()
    again = export(two_phases, "cyclonedx")
    assert index.requested == [], "the uv.lock that is there is used"
    ours, theirs = json.loads(fresh), json.loads(again)
    assert ours["components"] == theirs["components"]
    assert ours["dependencies"] == theirs["dependencies"]
    assert export(two_phases, "cyclonedx") == again


def test_cyclonedx_takes_no_uv_lock_that_is_not_of_the_lock(two_phases: Any, wheel: Callable[..., Path]) -> None:
    before = export(two_phases, "cyclonedx")
    wheel("dep", "0.9")
    write_stack(two_phases.project, "t", {"lib": {}, "dep": {"version": "<1"}}, target="gpu", base=GPU_BASE)
    two_phases.run("lock", "--stack", "t")
    (lock_of(two_phases) / "uv.lock").write_bytes((lock_of(two_phases, name="t") / "uv.lock").read_bytes())
    assert export(two_phases, "cyclonedx") == before


# ---- no interpreter


@pytest.mark.parametrize("kind", ["requirements", "pylock", "cyclonedx"])
def test_no_format_asks_for_the_bases_python(two_phases: Any, tmp_path: Path, kind: str) -> None:
    before = export(two_phases, kind)
    # A uv that finds no Python by itself, and may not even read which it could download.
    two_phases.env |= {
        "UV_PYTHON_PREFERENCE": "only-managed",
        "UV_PYTHON_INSTALL_DIR": str(tmp_path / "pythons"),
        "UV_PYTHON_DOWNLOADS": "automatic",
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(tmp_path / "nowhere.json"),
    }
    assert export(two_phases, kind) == before


# ---- what comes from git, and torch from a folder


@pytest.fixture
def from_git(own: Any, wheel: Callable[..., Path], tmp_path: Path) -> tuple[Any, str]:
    """Locked: `gitlib` at a commit, and `dep`."""
    (tmp_path / "served/tools").mkdir(parents=True)
    files = {"pyproject.toml": pyproject("gitlib", "3.0") + 'dependencies = ["dep"]\n', "backend.py": BACKEND}
    commit = History(tmp_path / "served/tools/gitlib").commit("main", OLD, files)
    wheel("dep", "1.0")
    write_stack(own.project, "s", {"gitlib": {"git": REMOTE, "ref": "main"}})
    own.run("lock", "--stack", "s")
    (lock_of(own, BASE) / "uv.lock").unlink()
    return own, commit


def test_what_comes_from_git_is_pinned_by_its_commit_in_every_format(from_git: tuple[Any, str]) -> None:
    tool, commit = from_git
    export(tool, "requirements", "--output", "all.txt")
    text = (tool.project / "all.txt").read_text()
    assert f"gitlib @ git+{REMOTE}@{commit}" in text
    assert "--require-hashes" not in text
    place = venv(tool)
    shown = uv(tool, "pip", "install", "--dry-run", "--no-deps", "-r", tool.project / "all.txt", "--python", place)
    assert f"gitlib @ git+{REMOTE}@{commit}" in shown
    read = Pylock.from_dict(tomlread.loads(export(tool, "pylock")))
    (found,) = [package for package in read.packages if package.name == "gitlib"]
    assert found.vcs is not None
    assert (found.vcs.url, found.vcs.commit_id) == (REMOTE, commit)
    text = export(tool, "cyclonedx")
    assert schema_errors(text) is None
    (component,) = [item for item in json.loads(text)["components"] if item["name"] == "gitlib"]
    assert commit in component["purl"]
    assert REMOTE in urllib.parse.unquote(component["purl"])
    only = json.loads(export(tool, "cyclonedx", "--phases", "git"))
    assert [item["name"] for item in only["components"]] == ["gitlib"]


def test_torch_from_a_folder_keeps_its_hash_in_every_format(
    own: Any, wheel: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "torch builds"
    make_wheel(folder, "torch", "2.13.0+cpu", TORCH_TAGS, ("dep",))
    wheel("dep", "1.0")
    own.env["UV_FIND_LINKS"] = str(folder)
    write_stack(own.project, "s", {"torch": {"version": "==2.13.0"}})
    own.run("lock", "--stack", "s")
    (digest,) = re.findall(
        r"torch==2.13.0\+cpu.*\n\s+--hash=sha256:(\w+)", (lock_of(own, BASE) / "main.txt").read_text()
    )
    (lock_of(own, BASE) / "uv.lock").unlink()
    text = export(own, "cyclonedx")
    assert schema_errors(text) is None
    assert digest in text
    assert str(tmp_path) not in text
    done = own.run("export", "--stack", "s", "--format", "pylock", "--output", "pylock.toml")
    assert "torch 2.13.0+cpu is named by the place" in done.stderr
    place = venv(own)
    uv(own, "pip", "sync", own.project / "pylock.toml", "--python", place)
    assert installed(own, place) == {"torch": "2.13.0+cpu", "dep": "1.0"}
    assert digest in (own.project / "pylock.toml").read_text()
    # Where no place has that build, there is nothing to name in a pylock; the rest still works.
    own.env |= {"UV_FIND_LINKS": "", "ENVBUILD_TORCH_INDEX": "http://127.0.0.1:9/{build}"}
    assert "cpu" in refusal(own, "pylock", status=10)["what"]
    assert "torch==2.13.0+cpu" in export(own, "requirements")


def test_torch_from_an_index_of_its_own(own: Any, wheel: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    write_index(folder, "torch", [make_wheel(tmp_path / "built", "torch", "2.13.0+cpu", TORCH_TAGS, ("dep",))])
    wheel("dep", "1.0")
    write_stack(own.project, "s", {"torch": {"version": "==2.13.0"}})
    with served(folder) as address:
        own.env["ENVBUILD_TORCH_INDEX"] = address
        own.run("lock", "--stack", "s")
        (lock_of(own, BASE) / "uv.lock").unlink()
        text = export(own, "cyclonedx")
        assert schema_errors(text) is None
        assert address not in text
        assert {item["name"] for item in json.loads(text)["components"]} == {"torch", "dep"}
        read = Pylock.from_dict(tomlread.loads(export(own, "pylock")))
        assert {str(item.version) for item in read.packages} == {"2.13.0+cpu", "1.0"}


# ---- what is refused


def test_nothing_is_left_behind(two_phases: Any) -> None:
    before = sorted(os.listdir(lock_of(two_phases)))
    for kind in ("requirements", "pylock", "cyclonedx"):
        export(two_phases, kind, "--output", f"out/{'pylock.toml' if kind == 'pylock' else kind}")
    assert sorted(os.listdir(lock_of(two_phases))) == before
    assert sorted(os.listdir(two_phases.project / "out")) == ["cyclonedx", "pylock.toml", "requirements"]
    assert list((two_phases.cache / "staging").iterdir()) == []
    # What is refused writes nothing either.
    for name in ("lock.toml", "pylock.a.b.toml", "pylock.json"):
        assert "pylock.toml" in refusal(two_phases, "pylock", "--output", name, status=2)["fix"]
    assert "there is no lock" in refusal(two_phases, "pylock", "--name", "absent", status=3)["what"]
    main = lock_of(two_phases) / "main.txt"
    main.write_text(main.read_text().replace("1.0", "1.1"))
    refusal(two_phases, "requirements", status=5)
