"""`envbuild lock` for real: uv, the package index this machine has, and everything that can go wrong around them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.lock_runs import error, result
from helpers.wheels import make_wheel, served, write_index

from envbuild.catalog.catalog import Selection
from envbuild.catalog.site import load_site
from envbuild.lock.lockfile import LockDirectory, read_lock, read_pins
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.torch_builds import torch_source

FILES = ["compile.txt", "git.txt", "main.txt", "pyproject.toml", "stack.lock.toml", "uv.lock"]
LOCK = ("lock", "--stack", "mcore", "--target", "cpu")
TINY = ("lock", "--stack", "tiny", "--target", "cpu")
# Whatever this machine says about places with torch builds is taken away.
NO_PLACES = {
    "PIP_FIND_LINKS": "",
    "UV_FIND_LINKS": "",
    "PIP_CONFIG_FILE": "/dev/null",
    "ENVBUILD_CONFIG": "",
    "XDG_CONFIG_HOME": "/nonexistent",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
STACK = """\
summary = "a test's own"
driver = "mcore"
matrix = "certify-quick"
[[builds]]
target = "cpu"
bases = ["{base}"]
[components.torch]
version = "==2.13.0"
modules = ["torch"]
[requirements]
{requirements}
"""


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache-of-test-lock")


@pytest.fixture
def own(tmp_path: Path, own_cache: Path, tool: Any, selection: Selection) -> Any:
    """The tool in a project of the test's own, with a stack `tiny`: torch from a wheel made here, and psutil."""
    project = tmp_path / "project"
    write_stack(project, "tiny", selection, 'psutil = {reason = "a package from the index"}')
    return type(tool)(project, own_cache)


@pytest.fixture
def torch_wheel(tmp_path: Path, selection: Selection) -> Path:
    """A torch of a few bytes, in a folder of its own."""
    python = "cp" + selection.base.python.version.replace(".", "")
    tags = f"{python}-{python}-manylinux_2_28_x86_64"
    return make_wheel(tmp_path / "wheels", "torch", "2.13.0+cpu", tags, ("typing-extensions>=4",))


def write_stack(project: Path, name: str, selection: Selection, requirements: str) -> None:
    path = project / "envs" / "stacks" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STACK.format(base=selection.base_name, requirements=requirements))


@pytest.fixture
def tiny(own: Any, torch_wheel: Path) -> Any:
    """The same, with the wheel's folder as the only place of torch builds."""
    own.env = {**NO_PLACES, "UV_FIND_LINKS": str(torch_wheel.parent)}
    return own


def lock_of(tool: Any, stack: str) -> Path:
    (path,) = (tool.project / "lockfiles" / stack).iterdir()
    return path


def nothing_half_done(tool: Any) -> None:
    """No staging folder, nothing beside the locks, and every lock that is there can be read."""
    assert list((tool.cache / "staging").iterdir()) == []
    for record in (tool.project / "lockfiles").rglob("*"):
        assert not any(part.startswith(".") for part in record.relative_to(tool.project).parts), record
        if record.name == "stack.lock.toml":
            read_lock(record.parent)


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address on which nobody listens."""
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


def test_lock_again_does_nothing_and_says_so_within_two_seconds(tool: Any, mcore_lock: LockDirectory) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in mcore_lock.path.iterdir()}
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        done = tool.run(*LOCK)
        seconds.append(time.monotonic() - started)
        assert done.stdout.startswith("nothing to do: already locked as of ")
    # The best of three: other tests may run beside this one.
    assert min(seconds) < 2
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in mcore_lock.path.iterdir()} == before
    again = result(tool.run(*LOCK, "--json"))
    assert again["built"] is False
    assert again["digest"] == mcore_lock.lock.digest


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


def test_lock_with_the_build_of_the_package_index(own: Any, mcore_lock: LockDirectory) -> None:
    """The explicit way out where no CPU build can be reached."""
    with closed_port() as nowhere:
        own.env = {**NO_PLACES, "ENVBUILD_TORCH_INDEX": f"{nowhere}/{{build}}"}
        refused = error(own.run(*LOCK, "--json", status=10))
        assert "--torch-build index" in refused["fix"]
        assert f"index {nowhere}/cpu: cannot be reached" in refused["why"]
        locked = result(own.run(*LOCK, "--torch-build", "index", "--json"))
    assert locked["torch"] == {"version": "2.13.0", "build": "index", "found_in": "package-index"}
    assert locked["digest"] != mcore_lock.lock.digest
    assert locked["packages"]["main"] > len(mcore_lock.packages())
    nothing_half_done(own)


def test_build_of_the_package_index_is_taken_also_where_find_links_have_another(own: Any, torch_wheel: Path) -> None:
    """``==2.13.0`` takes ``2.13.0+cpu`` too, and uv prefers it."""
    own.env = {**NO_PLACES}
    plain = result(own.run(*LOCK, "--torch-build", "index", "--json"))
    own.env = {**NO_PLACES, "UV_FIND_LINKS": str(torch_wheel.parent)}
    again = result(own.run(*LOCK, "--torch-build", "index", "--upgrade", "--json"))
    assert again["torch"] == {"version": "2.13.0", "build": "index", "found_in": "package-index"}
    assert (again["built"], again["digest"]) == (True, plain["digest"])


# A small stack with a torch of its own: where it is found, and what goes wrong


def test_lock_is_the_same_lock_wherever_torch_is_found(tiny: Any, torch_wheel: Path, tmp_path: Path) -> None:
    by_folder = result(tiny.run(*TINY, "--json"))
    assert by_folder["built"] is True
    assert set(read_lock(lock_of(tiny, "tiny")).packages()) == {"psutil", "torch", "typing-extensions"}
    write_index(tmp_path / "www" / "whl" / "cpu", "torch", [torch_wheel])
    with served(tmp_path / "www") as address:
        tiny.env = {**NO_PLACES, "ENVBUILD_TORCH_INDEX": f"{address}/whl/{{build}}"}
        by_index = result(tiny.run(*TINY, "--upgrade", "--json"))
        tiny.env = {**NO_PLACES, "UV_FIND_LINKS": f"{address}/whl/cpu/torch/"}
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


def test_lock_goes_past_places_that_do_not_have_it(tiny: Any, torch_wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with closed_port() as nowhere:
        relative = os.path.relpath(torch_wheel.parent, tiny.project)  # uv runs in another directory
        places = f"{tmp_path / 'missing'},{tmp_path / 'empty'},{nowhere}/wheels/,{relative}"
        tiny.env = {**NO_PLACES, "UV_FIND_LINKS": places}
        assert result(tiny.run(*TINY, "--json"))["torch"]["found_in"] == "find-links"


def test_lock_names_every_place_tried_when_none_has_it(own: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with closed_port() as nowhere:
        own.env = {**NO_PLACES, "UV_FIND_LINKS": str(tmp_path / "empty"), "ENVBUILD_TORCH_INDEX": nowhere}
        done = own.run(*TINY, "--json", status=10)
    why = error(done)["why"]
    assert f"find-links {tmp_path / 'empty'}: no torch ==2.13.0 +cpu" in why
    assert f"index {nowhere}: cannot be reached" in why
    assert not (own.project / "lockfiles").exists()


def test_lock_that_does_not_resolve_keeps_uvs_explanation(tiny: Any, selection: Selection) -> None:
    contradiction = 'jinja2 = {version = "==3.1.6", reason = "a"}\nmarkupsafe = {version = "<1", reason = "b"}'
    write_stack(tiny.project, "tiny", selection, contradiction)
    done = tiny.run(*TINY, "--json", status=4)
    told = error(done)
    assert told["what"] == f"cannot resolve stack tiny on {selection.base_name}"
    explained = " ".join(told["why"].split())
    assert "jinja2" in explained
    assert "markupsafe<1" in explained
    assert "unsatisfiable" in explained
    assert "markupsafe<1" in Path(told["log"]).read_text()
    assert not (tiny.project / "lockfiles").exists()
    nothing_half_done(tiny)


def test_lock_that_no_longer_resolves_keeps_the_old_lock(tiny: Any, selection: Selection) -> None:
    digest = result(tiny.run(*TINY, "--json"))["digest"]
    write_stack(tiny.project, "tiny", selection, 'no-such-package-anywhere-at-all = {reason = "a"}')
    tiny.run(*TINY, status=4)
    assert read_lock(lock_of(tiny, "tiny")).lock.digest == digest


@pytest.mark.parametrize("how", ["offline", "closed-port"])
def test_lock_without_a_network(tiny: Any, tmp_path: Path, how: str) -> None:
    with closed_port() as nowhere:
        tiny.env |= {"UV_CACHE_DIR": str(tmp_path / "uv-cache"), "UV_HTTP_RETRIES": "0"}
        tiny.env |= {"UV_OFFLINE": "1"} if how == "offline" else {"UV_DEFAULT_INDEX": f"{nowhere}/simple"}
        told = error(tiny.run(*TINY, "--json", status=10))
    assert "cannot be reached" in told["what"]
    assert "UV_DEFAULT_INDEX" in told["fix"]
    assert not (tiny.project / "lockfiles").exists()
    nothing_half_done(tiny)


def test_lock_anew_when_the_stack_changes_and_with_upgrade(tiny: Any, selection: Selection) -> None:
    first = result(tiny.run(*TINY, "--json"))
    time.sleep(1)  # as_of has seconds
    upgraded = result(tiny.run(*TINY, "--upgrade", "--json"))
    assert upgraded["built"] is True
    assert upgraded["as_of"] > first["as_of"]
    write_stack(tiny.project, "tiny", selection, 'psutil = {version = "<7", reason = "a"}')
    changed = result(tiny.run(*TINY, "--json"))
    assert changed["built"] is True
    assert changed["digest"] != upgraded["digest"]


def test_lock_changed_by_hand_is_refused_until_upgrade(tiny: Any) -> None:
    digest = result(tiny.run(*TINY, "--json"))["digest"]
    main = lock_of(tiny, "tiny") / "main.txt"
    main.write_text(main.read_text().replace("psutil==", "psutil==0"))
    told = error(tiny.run(*TINY, "--json", status=5))
    assert "main.txt: the record states" in told["why"]
    assert "--upgrade" in told["fix"]
    assert "psutil==0" in main.read_text()
    assert result(tiny.run(*TINY, "--upgrade", "--json"))["digest"] == digest


def test_two_locks_at_once_become_one(tiny: Any) -> None:
    both = [tiny.start(*TINY, "--json") for _ in range(2)]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    results = [json.loads(out) for out, _ in told]
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
    [(False, "* resolve"), (False, "* write the lock"), (True, "* resolve"), (True, "  write the lock: done")],
    ids=["resolving", "writing", "resolving-over-a-lock", "replacing-a-lock"],
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
    out, err = process.communicate(timeout=20)
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
