"""Two machines on which mmdebstrap gives other bases build one image, once the base is published."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.kept_entries import keep_base
from helpers.loopback import serving
from helpers.mini import NAME, image_of, write_stack

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select
from envbuild.catalog.data import data_root
from envbuild.core import tomlread

# mmdebstrap of another day, in short: it adds a file.
OTHER_DAY = """\
#!/bin/sh
[ "$1" = --version ] && exec {program} "$1"
exec {program} --customize-hook='echo later >"$1"/etc/day' "$@"
"""


@pytest.fixture(scope="module")
def chosen() -> Selection:
    return select(Catalog.open(data_root()), "mcore", "cpu", "debian12", HostDistribution.here())


@pytest.fixture
def first(tmp_path: Path, chosen: Selection) -> Tool:
    """A machine that has the base, and has verified the lock on it."""
    keep_base(chosen, tmp_path / "first")
    project = tmp_path / "project"
    write_stack(project)
    tool = Tool(project, tmp_path / "first")
    tool.run("lock", "--stack", NAME, "--base", "debian12", "--verify")
    return tool


def published(tool: Tool, registry: str) -> dict[str, Any]:
    done = tool.run("publish", "--base", "debian12", "--to", f"{registry.removeprefix('http://')}/bases", "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def digests(made: dict[str, Any]) -> tuple[str, str]:
    return made["record"]["oci_digest"], made["record"]["sqsh"]["digest"]


@pytest.mark.slow
def test_the_lock_names_its_base_and_another_machine_takes_it(
    first: Tool, registry_address: str, tmp_path: Path
) -> None:
    base = published(first, registry_address)
    digest, again = base["digest"], published(first, registry_address)
    assert (base["nothing_to_do"], again) == (False, {**base, "nothing_to_do": True, "bytes_sent": 0})
    lock = (first.project / "lockfiles" / NAME / "debian12" / "stack.lock.toml").read_text()
    assert f'base_image = "{digest}"' in lock
    here = image_of(first, "--base", "debian12", "--locked-base")
    assert here["record"]["base_rebuilt"] is False

    repository = f"{registry_address.removeprefix('http://')}/bases"
    second = Tool(first.project, tmp_path / "second", {"ENVBUILD_BASE_REPOSITORIES": f"127.0.0.1:1/gone {repository}"})
    there = image_of(second, "--base", "debian12", "--locked-base", out="there")
    assert digests(there) == digests(here)
    assert there["record"]["base_rebuilt"] is False
    assert there["record"]["base_made_by"] == here["record"]["base_made_by"]
    assert [item["manifest_digest"] for item in there["record"]["reports"]] == [
        item["manifest_digest"] for item in here["record"]["reports"]
    ]
    # Once taken it is in the store, and no registry is asked.
    offline = Tool(first.project, tmp_path / "second", {"ENVBUILD_BASE_REPOSITORIES": "127.0.0.1:1/gone"})
    assert image_of(offline, "--base", "debian12", "--locked-base", out="there")["built"] is False


@pytest.mark.slow
def test_without_the_published_base_another_day_gives_another_image_which_says_so(
    first: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = image_of(first, "--base", "debian12")
    program = shutil.which("mmdebstrap")
    assert program
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/mmdebstrap"
    wrapper.write_text(OTHER_DAY.format(program=program))
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path('/usr/sbin')}:{Path('/usr/bin')}:/sbin:/bin")
    second = Tool(first.project, tmp_path / "second")
    refused = second.run("image", "--stack", NAME, "--base", "debian12", "--target", "cpu", "--locked-base", status=5)
    assert "as it was when the lock was verified cannot be had" in refused.stderr
    there = image_of(second, "--base", "debian12", out="there")
    assert digests(there) != digests(here)
    assert there["record"]["base_rebuilt"] is True
    assert json.loads((first.project / "there/images" / f"{NAME}-debian12-cpu" / "record.json").read_text())[
        "base_rebuilt"
    ]


@contextlib.contextmanager
def snapshots() -> Iterator[tuple[str, list[str]]]:
    """A mirror of snapshots in front of this machine's own: its address, and the moments that it was asked for."""
    asked: list[str] = []
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    )
    mirror = next(line.split()[0] for line in listed.stdout.splitlines() if line.split()[1] == "bookworm").rstrip("/")

    class Redirect(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            moment, _, rest = self.path.removeprefix("/").partition("/debian/")
            asked.append(moment)
            self.send_response(302)
            self.send_header("Location", f"{mirror}/{rest}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Redirect) as server:
        yield f"http://127.0.0.1:{server.server_port}/{{snapshot}}/debian", asked


@pytest.mark.slow
def test_a_mirror_with_snapshots_gives_the_locks_base_again(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_stack(project)
    with snapshots() as (mirror, asked):
        first, second = (Tool(project, tmp_path / name, {"ENVBUILD_APT_MIRROR": mirror}) for name in ("one", "two"))
        first.run("lock", "--stack", NAME, "--base", "debian12", "--verify")
        [moment] = set(asked)
        asked.clear()
        there = image_of(second, "--base", "debian12", "--locked-base")
        assert set(asked) == {moment}
    assert there["record"]["base_rebuilt"] is False
    lock = tomlread.loads((project / "lockfiles" / NAME / "debian12" / "stack.lock.toml").read_text())
    assert lock["base_made_at"].replace("-", "").replace(":", "") == moment
