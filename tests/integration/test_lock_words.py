"""Words of the command line and settings of the site that must not lose files, mislead, or change a lock unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from helpers.lock_runs import error, files_of, lock_of, result
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack

LOCK = ("lock", "--stack", "s")


@pytest.fixture
def stack(own: Any, wheel: Callable[..., None]) -> Any:
    """Stack `s` of `lib`, of which the index has a release and what comes after it."""
    wheel("lib", "1.0", requires=("dep",))
    wheel("lib", "2.0rc1")
    wheel("dep", "1.0")
    wheel("dep", "2.0")
    write_stack(own.project, "s", {"lib": {}})
    return own


def test_without_a_base_the_one_of_the_packages_cuda_is_taken(own: Any, wheel: Callable[..., None]) -> None:
    write_base(own.project, "small-cu126", cuda="12.6", glibc="2.35")
    wheel("lib", "1.0", requires=("core-cu12",))
    wheel("core_cu12", "1.0")
    builds = [{"target": "gpu", "bases": [GPU_BASE, "small-cu126"], "default_base": GPU_BASE}]
    write_stack(own.project, "s", {"lib": {}}, builds=builds)
    done = own.run(*LOCK, "--json")
    assert result(done)["base"] == "small-cu126"
    assert f"of another CUDA than base {GPU_BASE} has: taking small-cu126" in done.stderr
    assert "[cuda-mixed:" in error(own.run(*LOCK, "--base", GPU_BASE, "--json", status=5))["why"]


def test_diff_and_check_without_a_stack_are_about_every_lock(stack: Any, wheel: Callable[..., None]) -> None:
    stack.run(*LOCK)
    stack.run(*LOCK, "--pin", "dep=1.0", "--name", "x", status=2)  # dep is no component
    stack.run(*LOCK, "--pin", "lib=1.0", "--name", "x")
    wheel("lib", "1.1", requires=("dep",))
    output = result(stack.run("lock", "--diff", "--json"))["locks"]
    changed = {Path(lock["path"]).parent.name: [entry["to"] for entry in lock["changes"]] for lock in output}
    assert changed == {"s": ["1.1"], "x": []}
    assert len(result(stack.run("lock", "--check", "--stack", "s", "--json"))["checked"]) == 2
    assert len(result(stack.run("lock", "--check", "--name", "x", "--json"))["checked"]) == 1
    assert lock_of(stack, "x", BASE).components["lib"].version == "1.0"


def test_variables_of_uv_change_no_lock(stack: Any) -> None:
    stack.run(*LOCK, "--as-of", "2025-04-01")
    before = files_of(stack, "s")
    stack.env |= {"UV_PRERELEASE": "allow", "UV_RESOLUTION": "lowest", "UV_NO_SOURCES": "1", "UV_FROZEN": "1"}
    stack.env |= {"UV_PYTHON": "3.12", "RUST_LOG": "debug"}
    # Of another name, it is resolved anew: --upgrade keeps the versions of a dated lock.
    stack.run(*LOCK, "--as-of", "2025-04-01", "--name", "x")
    assert files_of(stack, "x") == before


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"])
def test_own_settings_of_uv_locate_packages_and_change_no_lock(stack: Any, tmp_path: Path, variable: str) -> None:
    stack.run(*LOCK, "--as-of", "2025-04-01")
    before = files_of(stack, "s")
    settings: dict[str, Any] = {
        "prerelease": "allow",
        "resolution": "lowest",
        "constraint-dependencies": ["dep<2"],
        "exclude-newer-package": {"lib": "2020-01-01T00:00:00Z"},
        "dependency-metadata": [{"name": "lib", "version": "1.0", "requires-dist": []}],
        "index": [{"url": stack.env.pop("UV_DEFAULT_INDEX"), "default": True}],
    }
    (tmp_path / "config/uv").mkdir(parents=True)
    (tmp_path / "config/uv/uv.toml").write_text(tomlkit.dumps(settings))
    stack.env |= dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), str(tmp_path / "none"))
    stack.env[variable] = str(tmp_path / "config")
    # Of another name, it is resolved anew: --upgrade keeps the versions of a dated lock.
    stack.run(*LOCK, "--as-of", "2025-04-01", "--name", "x")
    assert files_of(stack, "x") == before


def test_options_never_replace_a_lock_that_was_made_without_them(stack: Any) -> None:
    stack.run(*LOCK)
    before = files_of(stack, "s")
    words = ("--allow", "glibc")
    for other in (("--as-of", "2025-04-01"), ("--torch-build", "cu130"), words):
        refused = error(stack.run(*LOCK, *other, "--upgrade", "--json", status=2))
        assert refused["what"].startswith(
            f"{' '.join(other)} would make another lock of s on {BASE} than the existing one"
        )
        assert "was made without" in refused["why"]
        assert "--name s." in refused["fix"]
    # To another place they lock; to this one where it is named.
    (stack.project / "elsewhere").mkdir()
    stack.run(*LOCK, *words, "--out", "elsewhere")
    assert files_of(stack, "s") == before
    stack.run(*LOCK, *words, "--name", "s")
    assert files_of(stack, "s") != before
    # That one is made again by the same options, not by others, and without any.
    assert result(stack.run(*LOCK, *words, "--json"))["built"] is False
    refused = error(stack.run(*LOCK, "--allow", "forks", "--json", status=2))
    assert f"was made with {' '.join(words)}" in refused["why"]
    # Options that change nothing are no other ones.
    stack.run(*LOCK, "--torch-build", "cpu", "--as-of", "now")
    assert lock_of(stack, "s").inputs.allow == ()


def test_a_first_lock_takes_options_and_pins_go_to_a_named_place(stack: Any) -> None:
    components = {"lib": {}, "dep": {"version": ">=1"}}
    write_stack(stack.project, "s", components, anchor="lib")
    locked = result(stack.run(*LOCK, "--pin", "dep=1.0", "--out", "elsewhere", "--json"))
    assert (locked["components"]["dep"], Path(locked["path"]).name) == ("1.0", "elsewhere")
    assert not (stack.project / "lockfiles").exists()
    stack.run(*LOCK, "--allow", "glibc")
    assert lock_of(stack, "s").inputs.allow == ("glibc",)
