"""Settings of uv on this machine locate packages, and change nothing of what is installed from a lock."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from helpers.build_backend import BACKEND, pyproject
from helpers.lock_runs import OLD, error, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import write_stack

SYNC = ("sync", "--stack", "s", "--into", "venv", "--json")
INSTALL = """\
import sys
from pathlib import Path
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.lock.lockfile import read_lock
from envbuild.store.local import LocalStore
from envbuild.sync.build_environment import build_environment

lock, store = map(Path, sys.argv[1:])
print(build_environment(read_lock(lock), load_site(), LocalStore(store, SilentReporter()), SilentReporter()))
"""
SETTINGS = {"constraint-dependencies": ["dep<1"], "no-build": True, "pip": {"no-binary": ["lib"], "no-deps": False}}
EVERYTHING = {"lib-1.0", "dep-1.0", "kernels-1.0"}


@pytest.fixture
def locked(own: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path) -> Any:
    """Stack `s` of a wheel and of an sdist in phase compile, locked; uv's cache has nothing of it."""
    wheel("lib", "1.0", requires=("dep",))
    wheel("dep", "1.0")
    files = {"backend.py": BACKEND, "kernels.py": ""}
    index.add(make_sdist(tmp_path, "kernels", "1.0", pyproject=pyproject("kernels", "1.0"), files=files), OLD)
    components = {"lib": {"modules": ["lib"]}, "kernels": {"phase": "compile", "modules": ["kernels"]}}
    write_stack(own.project, "s", components)
    own.run("lock", "--stack", "s")
    own.env["UV_CACHE_DIR"] = str(tmp_path / "another")
    return own


def test_each_environment_has_logs_of_its_own(locked: Any) -> None:
    """Two may be filled at once, also from one lock."""
    folders = set()
    for into in ("venv", "other"):
        output = result(locked.run("sync", "--stack", "s", "--into", into, "--json"))
        (folder,) = {Path(phase["log"]).parent for phase in output["phases"]}
        assert folder.parent.name == "sync"
        assert folder.name.startswith("s-small-")
        assert list(folder.glob("*.log"))
        folders.add(folder)
    assert len(folders) == 2


def installed(own: Any) -> set[str]:
    assert result(own.run(*SYNC))["imported"] == ["lib", "kernels"]
    listed = (own.project / "venv/lib/python3.11/site-packages").glob("*.dist-info")
    return {path.name.removesuffix(".dist-info") for path in listed}


def test_variables_of_uv_change_nothing_of_what_is_installed(locked: Any, tmp_path: Path) -> None:
    (tmp_path / "others.txt").write_text("dep<1\nlib<1\n")
    for name in ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_BUILD_CONSTRAINT"):
        locked.env[name] = str(tmp_path / "others.txt")
    locked.env |= {"UV_EXCLUDE_NEWER": "2000-01-01", "UV_NO_BINARY": "1", "UV_NO_BUILD": "1", "UV_PYTHON": "3.12"}
    assert installed(locked) == EVERYTHING


def test_a_pyproject_of_the_current_directory_changes_nothing_of_what_is_installed(locked: Any) -> None:
    text = tomlkit.dumps({"project": {"name": "mine", "version": "0"}, "tool": {"uv": SETTINGS}})
    (locked.project / "pyproject.toml").write_text(text)
    assert installed(locked) == EVERYTHING


@pytest.mark.parametrize("where", ["both", "named"])
def test_a_uv_toml_locates_packages_and_no_more(locked: Any, tmp_path: Path, where: str) -> None:
    places = {"index": [{"url": locked.env.pop("UV_DEFAULT_INDEX"), "default": True}]}
    locked.env |= dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), str(tmp_path / "none"))
    variables = {"user": "XDG_CONFIG_HOME", "system": "XDG_CONFIG_DIRS", "named": "UV_CONFIG_FILE"}
    parts = {"named": {**SETTINGS, **places}} if where == "named" else {"user": SETTINGS, "system": SETTINGS | places}
    for part, settings in parts.items():
        file = tmp_path / part / "uv/uv.toml"
        file.parent.mkdir(parents=True)
        file.write_text(tomlkit.dumps(settings))
        locked.env[variables[part]] = str(file if part == "named" else tmp_path / part)
    assert installed(locked) == EVERYTHING


def test_a_uv_toml_that_cannot_be_read_is_named(locked: Any, tmp_path: Path) -> None:
    (tmp_path / "uv.toml").write_text("pip = {")
    locked.env["UV_CONFIG_FILE"] = str(tmp_path / "uv.toml")
    refused = error(locked.run(*SYNC, status=3))
    assert str(tmp_path / "uv.toml") in refused["what"] + refused["why"]


def test_environments_that_wheels_are_built_in_are_not_disturbed_either(locked: Any, tmp_path: Path) -> None:
    (tmp_path / "others.txt").write_text("dep<1\n")
    locked.env["UV_CONSTRAINT"] = str(tmp_path / "others.txt")
    arguments = [str(locked.project / "lockfiles/s/small"), str(tmp_path / "store")]
    command = [*locked.command()[:1], "-c", INSTALL, *arguments]
    done = subprocess.run(command, env=locked.environment(), cwd=locked.project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    venv = Path(done.stdout.strip())
    assert list(venv.glob("lib/*/site-packages/dep-1.0.dist-info"))
