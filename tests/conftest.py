"""Fixtures that do real work once a session: the lock of stack mcore, its image, and an interpreter with the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from envbuild.catalog.catalog import Catalog, Machine, Selection, select
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.lock.locking import find_lock
from envbuild.lock.record import LockDirectory
from envbuild.lock.torch_builds import torch_source
from envbuild.lock.uv import uv_program

# Started in the background of a script, everything ignores SIGINT and hands that on; tests send it and mean it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Tool:
    """Runs the real command line in a project directory with a cache of its own."""

    project: Path
    cache: Path
    env: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "ENVBUILD_CACHE_DIR": str(self.cache), "NO_COLOR": "1", **self.env}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "envbuild", *arguments]

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments), cwd=self.project, env=self.environment(), capture_output=True, text=True
        )
        assert done.returncode == status, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that a test is going to interrupt."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.project,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


# What a session makes once, only some files use: all tests of such files run in one worker, beside the others.
MADE_ONCE = {
    "image": ("e2e/test_main_job", "integration/test_image_native", "integration/test_launch_runtimes"),
    "stack": ("integration/test_certify", "integration/test_smoke_parity"),
}


# First, because pytest-xdist turns the marks into its own names when it sees the same call.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, and the files that share costly fixtures, in one worker."""
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
        group = next((name for name, files in MADE_ONCE.items() if file in files), file)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def site_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the session and all its workers; ENVBUILD_TEST_CACHE keeps it between sessions."""
    kept = os.environ.get("ENVBUILD_TEST_CACHE")
    if kept:
        return Path(kept)
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(scope="session")
def project_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="session")
def tool(project_dir: Path, site_cache: Path) -> Tool:
    return Tool(project_dir, site_cache)


@pytest.fixture(scope="session")
def selection() -> Selection:
    return select(Catalog.open(data_root()), "mcore", "cpu", None, Machine.here())


@pytest.fixture(scope="session")
def mcore_lock(tool: Tool, selection: Selection) -> LockDirectory:
    """The lock of stack mcore on this machine's base, made by the command line."""
    tool.run("lock", "--stack", "mcore", "--target", "cpu")
    return find_lock(tool.project, "mcore", selection.base_name)


@pytest.fixture(scope="session")
def stack_python(
    mcore_lock: LockDirectory, selection: Selection, tmp_path_factory: pytest.TempPathFactory, site_cache: Path
) -> Path:
    """A Python with the locked stack, installed as the README tells people without envbuild."""
    venv = tmp_path_factory.mktemp("stack") / "venv"
    uv = uv_program()
    torch = mcore_lock.lock.torch
    source = torch_source(
        load_site(), selection.stack.components["torch"].version, torch.build, mcore_lock.lock.base.python
    )
    env = {**os.environ, "VIRTUAL_ENV": str(venv), "UV_LINK_MODE": "copy"}
    subprocess.run([uv, "venv", "-q", "--python", selection.base.python.executable, venv], check=True, env=env)
    main = mcore_lock.file("main")
    assert main is not None
    install = [uv, "pip", "install", "-q", "--no-deps", "--require-hashes", *source.uv_args(), "-r", main]
    subprocess.run(install, check=True, env=env)
    return venv / "bin" / "python"
