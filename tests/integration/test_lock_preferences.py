"""Versions that upstream's files name, and nothing decides: taken where everything accepts them. Real uv and git."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from helpers.lock_runs import OLD, lock_of
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import NEMO_URL, SETUPTOOLS, Upstream, project_files

from envbuild.lock.lockfile import read_lock

LOCK = ("lock", "--stack", "nemo", "--no-verify")


SOURCE = 'source = { registry = "https://vendor.invalid/simple" }'


def uv_lock(overrides: str = "", **versions: str) -> str:
    tables = [f'[[package]]\nname = "{name}"\nversion = "{version}"\n{SOURCE}\n' for name, version in versions.items()]
    return f"version = 1\nrevision = 3\n[manifest]\noverrides = [{overrides}]\n" + "\n".join(tables)


@pytest.fixture
def tree(nemo: Any, upstream: Upstream) -> Callable[..., str]:
    """Commits to NeMo's main, which needs ``lib``, with more files; stack `nemo` of it and of ``part``."""
    components: dict[str, Any] = {
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]},
        "part": {},
    }
    requirements = {"setuptools": SETUPTOOLS}
    write_stack(nemo.project, "nemo", components, anchor="nemo-toolkit", as_of="now", requirements=requirements)

    def commit(files: Mapping[str, str], *needs: str) -> str:
        own = project_files("nemo-toolkit", "2.3.0", "nemo", needs or ("lib",))
        return upstream.nemo.commit("main", "2025-03-20T12:00:00Z", {**own, **files})[:12]

    return commit


def packages(nemo: Any) -> dict[str, str]:
    return read_lock(nemo.project / "lockfiles/nemo" / BASE).packages()


@pytest.fixture
def releases(wheel: Callable[..., None]) -> Callable[..., None]:
    """``part`` and ``lib``, which needs ``deep``, in three releases each."""
    for version in ("1.0", "2.0", "3.0"):
        wheel("part", version, OLD)
        wheel("lib", version, OLD, requires=("deep",))
        wheel("deep", version, OLD)
    return wheel


def test_versions_of_upstreams_lock_are_taken_also_of_what_only_others_need(
    nemo: Any, tree: Callable[..., str], releases: Callable[..., None]
) -> None:
    releases("deep", "2.5rc1", OLD)
    at = tree({"uv.lock": uv_lock(part="2.0", lib="1.0", deep="2.5rc1", unused="1")})
    nemo.run(*LOCK)
    actual = packages(nemo)
    assert (actual["part"], actual["lib"], actual["deep"]) == ("2.0", "1.0", "2.5rc1")
    lock = lock_of(nemo, "nemo")
    assert lock.components["part"].because == f"uv.lock of nemo-toolkit {at}"
    assert lock.preferred == (f"uv.lock of nemo-toolkit {at}: 3 of 3 versions",)


def test_what_anything_asks_for_wins_over_upstreams_lock(
    nemo: Any, tree: Callable[..., str], releases: Callable[..., None]
) -> None:
    """A range, a release that the index never had, what upstream leaves to its image, and an override of it."""
    at = tree(
        {
            "uv.lock": uv_lock(
                "{ name = 'deep', marker = \"sys_platform == 'never'\" }", part="0.9rc5", lib="1.0", deep="1.0"
            )
        },
        "lib>=2",
    )
    nemo.run(*LOCK)
    actual = packages(nemo)
    assert (actual["part"], actual["lib"], actual["deep"]) == ("3.0", "3.0", "3.0")
    lock = lock_of(nemo, "nemo")
    assert lock.components["part"].because == "the stack's file"
    assert lock.preferred == (f"uv.lock of nemo-toolkit {at}: 0 of 2 versions; not lib 3.0 (1.0), part 3.0 (0.9rc5)",)
