"""A hostile .sqsh in the hands of root: another account of the machine gets nothing of it, at no moment."""

from __future__ import annotations

import json
import subprocess
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


@pytest.mark.slow
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
def test_opening_it_gives_nothing_away(hostile: Path, reachable: Path, tmp_path: Path, command: str) -> None:
    place = reachable / command
    place.mkdir()
    tool = Tool(tmp_path, place / "store", {"TMPDIR": str(place)})
    with watched(place) as seen:
        arguments = ["inspect", hostile] if command == "inspect" else ["diff", hostile, hostile, "--files"]
        done = tool.run("image", *map(str, arguments), "--json")
    assert (seen.dangerous, seen.taken) == ([], [])
    output = json.loads(done.stdout)
    if command == "inspect":
        (layer,) = output["layers"]
        assert layer["entries"] == 34
        assert layer["unpacked_bytes"] > 24 * (4 << 20)
    else:
        assert output["equal"] is True


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
