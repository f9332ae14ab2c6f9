"""A hostile .sqsh in the hands of root: another account of the machine gets nothing of it, at no moment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Tool
from helpers.attackers import Seen, hostile_sqsh, reachable_folder, watched
from helpers.inside import run_in_sqsh
from helpers.processes import wait_until

from envbuild.core.errors import CheckRefusedError
from envbuild.launch.open_image import open_image
from envbuild.launch.runtimes import RUNTIMES, probe


@pytest.fixture(scope="module")
def reachable() -> Iterator[Path]:
    with reachable_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def hostile(reachable: Path) -> Path:
    (reachable / "made").mkdir()
    return hostile_sqsh(reachable / "made")


def test_the_watch_would_see_it(hostile: Path, reachable: Path) -> None:
    """What was demonstrated: unpacked by root into a folder that others may enter."""
    store = reachable / "as it was"
    store.mkdir()
    with watched(store) as seen:
        subprocess.run(["unsquashfs", "-q", "-n", "-d", store / "staging", hostile], check=True, capture_output=True)
        assert_was_open(seen)


def assert_was_open(seen: Seen) -> None:
    wait_until(lambda: {line.rpartition("/")[2] for line in seen.look().dangerous} >= {"aaa", "zzz", "disk", "null"})
    wait_until(lambda: any("euid=0(root)" in line for line in seen.look().taken))
    wait_until(lambda: any(line.endswith("/disk") for line in seen.look().taken))
    wait_until(lambda: any(line.endswith("/open") for line in seen.look().taken))


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_looking_at_it_gives_nothing_away(hostile: Path, reachable: Path, tmp_path: Path, command: str) -> None:
    place = reachable / command
    place.mkdir()
    tool = Tool(tmp_path, place / "store", {"TMPDIR": str(place)})
    with watched(place) as seen:
        arguments = ["inspect", hostile] if command == "inspect" else ["diff", hostile, hostile, "--files"]
        done = tool.run("image", *map(str, arguments), "--json")
    assert (seen.dangerous, seen.taken) == ([], [])
    told = json.loads(done.stdout)
    if command == "inspect":
        (layer,) = told["layers"]
        assert layer["entries"] == 34
        assert layer["unpacked_bytes"] > 24 * (4 << 20)
    else:
        assert told["equal"] is True


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_running_in_it_gives_nothing_away(hostile: Path, reachable: Path, runtime: str) -> None:
    """As `certify` does: mounted without its rights, or unpacked without them."""
    scratch = reachable / runtime
    scratch.mkdir()
    with watched(scratch) as seen:
        assert run_in_sqsh(probe(runtime), hostile, ["/aaa"], scratch).status != 0
    assert (seen.dangerous, seen.taken) == ([], [])
    assert [path for path in scratch.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("place", ["etc", "etc/environment"])
@pytest.mark.parametrize("leads_to", ["/dev/zero", "/proc/self/environ", "outside", "/oldroot/etc/passwd"])
def test_a_link_in_it_is_not_followed_when_it_is_opened(
    reachable: Path, tmp_path: Path, runtime: str, place: str, leads_to: str
) -> None:
    """Not on this machine, where it would be read for its variables, and not in the image by its own programs."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/environment").write_text("SECRET=of-this-machine\n")
    link = tmp_path / "tree" / place
    link.parent.mkdir(parents=True)
    outside = tmp_path / "outside" / ("" if place == "etc" else "environment")
    link.symlink_to(outside if leads_to == "outside" else leads_to)
    file = tmp_path / "linked.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "tree", file, "-quiet", "-no-progress"], check=True, capture_output=True)
    with open_image(probe(runtime), file, tmp_path / "scratch") as opened:
        assert opened.variables == {}


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_variables_that_no_process_can_have_are_refused(tmp_path: Path, runtime: str) -> None:
    (tmp_path / "tree/etc").mkdir(parents=True)
    (tmp_path / "tree/etc/environment").write_bytes(b"A=b\0c\n")
    file = tmp_path / "nul.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "tree", file, "-quiet", "-no-progress"], check=True, capture_output=True)
    with pytest.raises(CheckRefusedError, match="cannot be opened"), open_image(probe(runtime), file, tmp_path / "s"):
        pass


@pytest.mark.slow
def test_probe_is_not_disturbed_by_mounts_that_come_and_go(tmp_path: Path) -> None:
    """dockerd's folder is a shared mount: what is unmounted there goes everywhere, also while bubblewrap works."""
    script = f"""
import os, subprocess, sys, threading
sys.path[:0] = {[str(Path(__file__).parents[2] / "build")]!r}
from envbuild.core import sandbox
sandbox.TRIES = 1
place = {str(tmp_path / "shared")!r}
os.mkdir(place)
for words in (["--bind", place, place], ["--make-shared", place]):
    subprocess.run(["mount", *words], check=True)
over = threading.Event()
def churn():
    folders = [os.path.join(place, str(number)) for number in range(8)]
    for folder in folders:
        os.mkdir(folder)
    while not over.is_set():
        for folder in folders:
            subprocess.run(["mount", "-t", "tmpfs", "x", folder], check=True)
        for folder in folders:
            subprocess.run(["umount", folder], check=True)
busy = threading.Thread(target=churn)
busy.start()
try:
    for _ in range(150):
        sandbox.probe()
finally:
    over.set()
    busy.join()
"""
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
