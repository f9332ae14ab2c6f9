"""Fixtures that do real work once a session: the lock of stack mcore, its image, and an interpreter with the stack."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run_here

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.core import locks
from envbuild.core.errors import EnvbuildError
from envbuild.lock.lockdir import find_lock
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.torch_builds import torch_source

# Started in the background of a script, everything ignores SIGINT and hands that on; tests send it and mean it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As bytecode pytest keeps the test modules that it rewrote; else each worker rewrites all of them at every start, 8 s.
# Nor does each process of a test compile what was changed in envbuild.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each look of uv for a Python starts pyenv's shims, which are shell scripts: 0.4 s of every `uv lock`.
os.environ["PATH"] = os.pathsep.join(
    folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder).name != "shims"
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: looking through it for garbage took a seventh of the time of the unit tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A command that ended by Ctrl-C in this process leaves SIGINT ignored, and the next test's programs inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, pytest.TestReport]:
    """An error's cause and its log belong into the report: its text is one sentence."""
    report: pytest.TestReport = yield
    error = call.excinfo.value if call.excinfo else None
    while error is not None:
        if isinstance(error, EnvbuildError):
            log = error.log.read_text(errors="replace")[-5000:] if error.log and error.log.is_file() else ""
            report.sections.append((f"cause: {error.what}", "\n".join(filter(None, [error.why, error.fix, log]))))
        error = error.__cause__ or error.__context__
    return report


@dataclass
class Tool:
    """Runs the real command line in a project directory with a cache of its own.

    Attributes:
        verifies: locks of open stacks are installed and imported, as for users; else only where a test says so.
    """

    project: Path
    cache: Path
    env: dict[str, str] = field(default_factory=dict)
    verifies: bool = True

    def environment(self) -> dict[str, str]:
        own = {"ENVBUILD_CACHE_DIR": str(self.cache), "ENVBUILD_STATE_DIR": str(self.project / "state")}
        return {**os.environ, **own, "NO_COLOR": "1", **self.env}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "envbuild", *arguments]

    def run(self, *arguments: str, status: int | None = 0, in_process: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in this process unless it must not be (threads, closed streams).

        Args:
            status: the exit code that it must have; None: any.
        """
        if not self.verifies and arguments[0] == "lock" and not {"--check", "--verify", "--no-verify"} & {*arguments}:
            arguments = (*arguments, "--no-verify")
        if in_process and threading.current_thread() is threading.main_thread():
            done = run_here(list(arguments), self.project, self.environment())
        else:
            done = subprocess.run(
                self.command(*arguments), cwd=self.project, env=self.environment(), capture_output=True, text=True
            )
        assert status in (None, done.returncode), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
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


@pytest.fixture(scope="session")
def site_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the session and all its workers; ENVBUILD_TEST_CACHE keeps it between sessions."""
    kept = os.environ.get("ENVBUILD_TEST_CACHE")
    if kept:
        return Path(kept)
    cache = shared_folder(tmp_path_factory) / "cache"
    cache.mkdir(exist_ok=True)
    return cache


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def project_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="session")
def tool(project_dir: Path, site_cache: Path) -> Tool:
    return Tool(project_dir, site_cache)


@pytest.fixture(scope="session")
def selection() -> Selection:
    return select(Catalog.open(data_root()), "mcore", "cpu", None, HostDistribution.here())


@pytest.fixture(scope="session")
def mcore_lock(tool: Tool, selection: Selection) -> LockDirectory:
    """The lock of stack mcore on this machine's base, made by the command line."""
    tool.run("lock", "--stack", "mcore", "--target", "cpu")
    return find_lock(tool.project, selection)


@pytest.fixture(scope="session")
def stack_python(mcore_lock: LockDirectory, selection: Selection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the locked stack, installed once a session, as the README tells people without envbuild."""
    venv = shared_folder(tmp_path_factory) / "stack-venv"
    with locks.exclusive(venv.with_suffix(".lock")):
        if not venv.exists():
            staged = tmp_path_factory.mktemp("stack") / "venv"
            install_stack(staged, mcore_lock, selection)
            staged.rename(venv)
            compile_stack(venv / "bin" / "python")
    return venv / "bin" / "python"


def compile_stack(python: Path) -> None:
    """Compile what a run imports, once: to do it again in each run and each copy was most of what a run did."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPATH"] = str(data_root() / "smoke")
    done = subprocess.run([python, "-c", "import envbuild_smoke.drivers.mcore"], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr


def install_stack(venv: Path, lock: LockDirectory, selection: Selection) -> None:
    uv = uv_program()
    torch = lock.lock.torch
    source = torch_source(load_site(), selection.stack.components["torch"].version, torch.build, lock.lock.base.python)
    env = {**os.environ, "VIRTUAL_ENV": str(venv), "UV_LINK_MODE": "copy"}
    python = selection.base.python.executable
    subprocess.run([uv, "venv", "-q", "--relocatable", "--python", python, venv], check=True, env=env)
    main = lock.file("main")
    assert main is not None
    install = [uv, "pip", "install", "-q", "--no-deps", "--require-hashes", *source.uv_args(), "-r", main]
    subprocess.run(install, check=True, env=env)
