"""Components that uv went back on: newer releases where the rest allows them, and what prevents them. Real uv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.lock_runs import OLD, lock_of
from helpers.stack_files import write_stack
from helpers.upstreams import NEMO_URL, SETUPTOOLS, Upstream, project_files

LOCK = ("lock", "--stack", "nemo", "--no-verify")
OLDER = "2024-06-01T00:00:00Z"


@pytest.fixture
def tree(nemo: Any, upstream: Upstream) -> Callable[..., None]:
    """Stack `nemo` of NeMo, ``run`` and ``lib<2``; commits to NeMo with settings of uv."""
    components: dict[str, Any] = {"nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]}, "run": {}}
    requirements = {"setuptools": SETUPTOOLS, "other": {"reason": "a", "version": "<2"}}
    write_stack(nemo.project, "nemo", components, anchor="nemo-toolkit", as_of="now", requirements=requirements)

    def commit(settings: str = "", **more: str) -> None:
        files = project_files("nemo-toolkit", "2.3.0", "nemo", ())
        files["pyproject.toml"] = f"{files['pyproject.toml']}[tool.uv]\n{settings}\n"
        upstream.nemo.commit("main", "2025-03-20T12:00:00Z", files | more)

    return commit


def test_what_holds_a_component_back_is_named(nemo: Any, tree: Callable[..., None], wheel: Callable[..., None]) -> None:
    """As nemo-run 0.4.0, where a package that the stack limits has no release that a newer one accepts."""
    wheel("run", "0.4", OLDER)
    wheel("run", "0.11", OLD, requires=("other>=3",))
    for version in ("1.0", "3.0"):
        wheel("other", version, OLD)
    tree()
    done = nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo")
    assert lock.components["run"].version == "0.4"
    assert lock.held_back == ("run 0.4 (2024-06-01), not 0.11: held back by other",)
    assert "old: run 0.4 (2024-06-01), not 0.11: held back by other" in done.stdout


def test_what_upstream_forces_gives_way(nemo: Any, tree: Callable[..., None], wheel: Callable[..., None]) -> None:
    wheel("run", "0.4", OLDER)
    wheel("run", "0.11", OLD, requires=("deep",))
    wheel("deep", "1.0", OLD, requires=("nobody-has-this",))
    wheel("deep", "2.0", OLD)
    wheel("other", "1.0", OLD)
    tree('override-dependencies = ["deep==1.0"]')
    nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo")
    assert lock.components["run"].version == "0.11"
    assert lock.held_back == ()
    assert lock.deviations == ("deep any release instead of ==1.0: it holds run back at 0.4 of 2024-06-01",)


@pytest.mark.parametrize(("uploaded", "taken"), [("2024-03-01T00:00:00Z", "0.11"), (OLDER, "0.4")])
def test_what_upstreams_own_uv_lock_went_back_to(
    nemo: Any, tree: Callable[..., None], wheel: Callable[..., None], uploaded: str, taken: str
) -> None:
    """As nemo-run 0.4.0 in Megatron-Bridge's of 2026, 16 months after its release."""
    wheel("run", "0.4", uploaded)
    wheel("run", "0.11", OLD)
    wheel("other", "1.0", OLD)
    source = 'source = { registry = "https://index.example/simple" }'
    tree(**{"uv.lock": f'version = 1\n[[package]]\nname = "run"\nversion = "0.4"\n{source}\n'})
    nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo")
    assert lock.components["run"].version == taken
    assert [text.partition(":")[0] for text in lock.deviations] == (
        ["run >0.4 instead of ==0.4"] if taken == "0.11" else []
    )


def test_old_release_that_is_the_newest_is_no_fallback(
    nemo: Any, tree: Callable[..., None], wheel: Callable[..., None]
) -> None:
    wheel("run", "0.4", OLDER)
    wheel("other", "1.0", OLD)
    tree()
    nemo.run(*LOCK)
    assert lock_of(nemo, "nemo").held_back == ()
