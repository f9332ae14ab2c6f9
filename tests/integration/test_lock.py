"""`envbuild lock` for real: real uv, and everything that can go wrong around it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.lock_runs import error, result
from helpers.stack_files import write_stack
from helpers.wheels import make_wheel, served, write_index

from envbuild.catalog.catalog import Selection
from envbuild.catalog.site import load_site
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.requirement_lines import read_pins
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.torch_builds import torch_source

FILES = ["compile.txt", "git.txt", "main.txt", "pyproject.toml", "stack.lock.toml", "uv.lock"]
LOCK = ("lock", "--stack", "mcore", "--target", "cpu")
TINY = ("lock", "--stack", "tiny", "--target", "cpu")
TORCH_TAGS = "cp311-cp311-manylinux_2_28_x86_64"


@pytest.fixture
def torch_wheel(tmp_path: Path) -> Path:
    """A torch of a few bytes, in a folder of its own."""
    return make_wheel(tmp_path / "torch", "torch", "2.13.0+cpu", TORCH_TAGS, ("typing-extensions>=4",))


@pytest.fixture
def bare(own: Any, wheel: Callable[..., Path], tmp_path: Path) -> Any:
    """The tool with a stack `tiny` of torch and psutil, and no place of torch builds."""
    for name, version in (("psutil", "6.0"), ("psutil", "7.0"), ("typing_extensions", "4.14")):
        wheel(name, version)
    write_tiny(own, psutil="")
    own.env |= {"PIP_CONFIG_FILE": "/dev/null", "ENVBUILD_CONFIG": "", "XDG_CONFIG_HOME": str(tmp_path / "none")}
    return own


@pytest.fixture
def tiny(bare: Any, torch_wheel: Path) -> Any:
    """The same, with the wheel's folder as the only place of torch builds."""
    bare.env["UV_FIND_LINKS"] = str(torch_wheel.parent)
    return bare


def write_tiny(tool: Any, **requirements: str) -> None:
    needed = {name: {"version": version, "reason": "a"} for name, version in requirements.items()}
    write_stack(tool.project, "tiny", {"torch": {"version": "==2.13.0", "modules": ["torch"]}}, requirements=needed)


def lock_of(tool: Any, stack: str) -> Path:
    (path,) = (tool.project / "lockfiles" / stack).iterdir()
    return path


def nothing_half_done(tool: Any) -> None:
    """No staging folder, nothing next to the locks, and every lock that is there can be read."""
    assert list((tool.cache / "staging").iterdir()) == []
    for record in (tool.project / "lockfiles").rglob("*"):
        assert not any(part.startswith(".") for part in record.relative_to(tool.project).parts), record
        if record.name == "stack.lock.toml":
            read_lock(record.parent)


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address without a listener."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


# The lock of the shipped stack


def test_lock_has_the_files_of_the_design(mcore_lock: LockDirectory) -> None:
    assert sorted(path.name for path in mcore_lock.path.iterdir()) == FILES
    assert {oct(path.stat().st_mode & 0o777) for path in mcore_lock.path.iterdir()} == {"0o644"}
    assert oct(mcore_lock.path.stat().st_mode & 0o777) == "0o755"


def test_lock_names_no_place_outside_uv_lock(mcore_lock: LockDirectory) -> None:
    site = load_site()
    for name in FILES[:-1]:
        text = (mcore_lock.path / name).read_text()
        assert "://" not in text
        assert not any(place in text for place in (*site.find_links, str(site.cache_dir), str(Path.home())))


def test_lock_pins_everything_with_hashes(mcore_lock: LockDirectory) -> None:
    text = (mcore_lock.path / "main.txt").read_text()
    blocks = [block for block in text.split("\n") if block[:1].isalnum()]
    assert len(blocks) == mcore_lock.lock.phases["main"].packages == len(read_pins(text))
    assert text.count("--hash=sha256:") >= len(blocks)
    packages = mcore_lock.packages()
    assert packages["torch"] == mcore_lock.lock.torch.version
    assert {"megatron-core", "psutil", "numpy"} <= set(packages)


def test_lock_again_does_nothing(tool: Any, mcore_lock: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program is started, no address is looked up, no file is written."""
    started: list[object] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, *words, **more: started.append(words))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words: started.append(words))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in mcore_lock.path.iterdir()}
    assert tool.run(*LOCK).stdout.startswith("nothing to do: already locked as of ")
    again = result(tool.run(*LOCK, "--json"))
    assert (again["built"], again["digest"]) == (False, mcore_lock.lock.digest)
    assert started == []
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in mcore_lock.path.iterdir()} == before


@pytest.fixture
def bare_venv(tmp_path: Path, selection: Selection) -> dict[str, str]:
    """An environment with the base's Python, as someone without envbuild makes it."""
    subprocess.run(
        [uv_program(), "venv", "-q", "--python", selection.base.python.executable, tmp_path / "venv"], check=True
    )
    return {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}


def place_arguments(lock: LockDirectory, selection: Selection) -> list[str]:
    torch = lock.lock.torch
    version = selection.stack.components["torch"].version
    return torch_source(load_site(), version, torch.build, lock.lock.base.python).uv_args()


def test_lock_installs_with_the_three_plain_commands(
    mcore_lock: LockDirectory, selection: Selection, bare_venv: dict[str, str]
) -> None:
    commands = [
        ["--no-deps", "--require-hashes", *place_arguments(mcore_lock, selection), "-r", "main.txt"],
        ["--no-deps", "--require-hashes", "--no-build-isolation", "-r", "compile.txt"],
        ["--no-deps", "--no-build-isolation", "-r", "git.txt"],
    ]
    for arguments in commands:
        done = subprocess.run(
            [uv_program(), "pip", "install", "--dry-run", *arguments],
            cwd=mcore_lock.path, env=bare_venv, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "main.txt" in arguments:
            would = {line[3:] for line in done.stderr.splitlines() if line.startswith(" + ")}
            assert would == {f"{name}=={version}" for name, version in mcore_lock.packages().items()}


def test_lock_gives_the_same_versions_with_plain_uv_sync(
    mcore_lock: LockDirectory, selection: Selection, tmp_path: Path
) -> None:
    """For someone who has only the files that are committed: uv.lock is not among them."""
    (tmp_path / "pyproject.toml").write_text((mcore_lock.path / "pyproject.toml").read_text())
    # An index of torch builds is no find-links place; what holds for both is tested with the tiny stack.
    places = place_arguments(mcore_lock, selection)
    done = subprocess.run(
        [uv_program(), "sync", "--dry-run", *places, "--extra", "compile"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    would = {line[3:] for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert would == {f"{name}=={version}" for name, version in mcore_lock.packages().items()}


# A small stack with a torch of its own: where it is found, and what goes wrong


def test_lock_with_the_build_of_the_package_index(bare: Any, wheel: Callable[..., Path], torch_wheel: Path) -> None:
    """The explicit way out where no CPU build can be reached."""
    wheel("torch", "2.13.0", tags=TORCH_TAGS, requires=("typing-extensions>=4",))
    with closed_port() as nowhere:
        bare.env["ENVBUILD_TORCH_INDEX"] = f"{nowhere}/{{build}}"
        refused = error(bare.run(*TINY, "--json", status=10))
        assert "--torch-build index" in refused["fix"]
        assert f"index {nowhere}/cpu: cannot be reached" in refused["why"]
        locked = result(bare.run(*TINY, "--torch-build", "index", "--json"))
    assert locked["torch"] == {"version": "2.13.0", "build": "index", "found_in": "package-index"}
    # It is taken also where find-links have another: `==2.13.0` takes 2.13.0+cpu too, and uv prefers it.
    bare.env["UV_FIND_LINKS"] = str(torch_wheel.parent)
    again = result(bare.run(*TINY, "--torch-build", "index", "--upgrade", "--json"))
    assert again["torch"] == locked["torch"]
    assert (again["built"], again["digest"]) == (True, locked["digest"])
    nothing_half_done(bare)


def test_lock_is_the_same_lock_wherever_torch_is_found(tiny: Any, torch_wheel: Path, tmp_path: Path) -> None:
    by_folder = result(tiny.run(*TINY, "--json"))
    assert by_folder["built"] is True
    assert set(read_lock(lock_of(tiny, "tiny")).packages()) == {"psutil", "torch", "typing-extensions"}
    write_index(tmp_path / "www" / "whl" / "cpu", "torch", [torch_wheel])
    with served(tmp_path / "www") as address:
        tiny.env |= {"UV_FIND_LINKS": "", "ENVBUILD_TORCH_INDEX": f"{address}/whl/{{build}}"}
        by_index = result(tiny.run(*TINY, "--upgrade", "--json"))
        del tiny.env["ENVBUILD_TORCH_INDEX"]
        tiny.env["UV_FIND_LINKS"] = f"{address}/whl/cpu/torch/"
        by_page = result(tiny.run(*TINY, "--upgrade", "--json"))
    assert [one["torch"]["found_in"] for one in (by_folder, by_index, by_page)] == [
        "find-links",
        "torch-index",
        "find-links",
    ]
    assert by_folder["digest"] == by_index["digest"] == by_page["digest"]
    for name in FILES[:-1]:
        assert "127.0.0.1" not in (lock_of(tiny, "tiny") / name).read_text()
    nothing_half_done(tiny)


def test_lock_is_made_anew_with_upgrade_and_when_the_stack_changes(tiny: Any) -> None:
    first = result(tiny.run(*TINY, "--json"))
    main = lock_of(tiny, "tiny") / "main.txt"
    main.write_text(main.read_text().replace("psutil==", "psutil==0"))
    refused = error(tiny.run(*TINY, "--json", status=5))
    assert "main.txt: the record states" in refused["why"]
    assert "--upgrade" in refused["fix"]
    assert "psutil==0" in main.read_text()
    upgraded = result(tiny.run(*TINY, "--upgrade", "--json"))
    assert (upgraded["built"], upgraded["digest"]) == (True, first["digest"])
    write_tiny(tiny, psutil="<7")
    changed = result(tiny.run(*TINY, "--json"))
    assert changed["built"] is True
    assert changed["digest"] != upgraded["digest"]
    # What no longer resolves leaves the old lock.
    write_tiny(tiny, absent="")
    tiny.run(*TINY, status=4)
    assert read_lock(lock_of(tiny, "tiny")).lock.digest == changed["digest"]


def test_two_locks_at_once_become_one(tiny: Any) -> None:
    both = [tiny.start(*TINY, "--json") for _ in range(2)]
    output = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    results = [json.loads(out) for out, _ in output]
    assert sorted(one["built"] for one in results) == [False, True]
    assert results[0]["digest"] == results[1]["digest"]
    nothing_half_done(tiny)


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(start):
            return
    pytest.fail(f"no line {start!r}")


@pytest.mark.parametrize(
    ("old", "moment"),
    [(False, "* write the lock"), (True, "  write the lock: done")],
    ids=["writing", "replacing-a-lock"],
)
def test_killed_lock_leaves_no_half_lock(tiny: Any, old: bool, moment: str) -> None:
    if old:
        tiny.run(*TINY)
    process = tiny.start(*TINY, "--upgrade")
    wait_for_line(process, moment)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    lockfiles = tiny.project / "lockfiles"
    if old:
        assert [read_lock(path.parent).lock.stack for path in lockfiles.glob("*/[!.]*/stack.lock.toml")] == ["tiny"]
    else:
        assert list(lockfiles.glob("*/[!.]*")) == []
    after = result(tiny.run(*TINY, "--json"))
    assert after["built"] is not old
    assert result(tiny.run(*TINY, "--upgrade", "--json"))["digest"] == after["digest"]
    nothing_half_done(tiny)


@pytest.mark.soak
def test_killed_at_random_moments_the_next_lock_is_the_same(tiny: Any) -> None:
    started = time.monotonic()
    digest = result(tiny.run(*TINY, "--json"))["digest"]
    seconds = time.monotonic() - started
    random = Random(1)
    for _ in range(30):
        if random.random() < 0.5:
            shutil.rmtree(tiny.project / "lockfiles")
        process = tiny.start(*TINY, "--upgrade")
        time.sleep(random.uniform(0, seconds))
        process.kill()
        process.communicate()
        assert result(tiny.run(*TINY, "--json"))["digest"] == digest
    tiny.run(*TINY, "--upgrade")
    nothing_half_done(tiny)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_uv_runs(tiny: Any, number: int) -> None:
    process = tiny.start(*TINY, "--json")
    wait_for_line(process, "* resolve")
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert json.loads(out)["error"]["kind"] == "InterruptedByUserError"
    assert "Traceback" not in err
    assert not (tiny.project / "lockfiles").exists()
    nothing_half_done(tiny)


@pytest.mark.parametrize("small", ["cache", "project"])
def test_full_disk(tiny: Any, tmp_path: Path, small: str) -> None:
    """A disk of four pages, in a mount namespace of the command's own."""
    disk = tmp_path / "small"
    disk.mkdir()
    if small == "project":
        (tiny.project / "lockfiles").symlink_to(disk)
    else:
        tiny.env |= {"ENVBUILD_CACHE_DIR": str(disk / "cache")}
    script = (
        'mount -t tmpfs -o size=16k tmpfs "$0" || exit 99; "$@"; status=$?; find "$0" -name "*.toml" >&2; exit $status'
    )
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(disk)]
    done = subprocess.run(
        [*namespace, *tiny.command(*TINY, "--json")],
        cwd=tiny.project,
        env=tiny.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 11, done.stdout + done.stderr
    assert "is full" in error(done)["what"]
    assert ".toml" not in done.stderr.splitlines()[-1]
