"""Words of the command line and settings of the site that must not lose files, mislead, or change a lock unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from helpers.lock_runs import error, files_of, lock_of, result
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack, write_target

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


def test_out_takes_no_folder_that_holds_other_files(stack: Any) -> None:
    (stack.project / "thesis/sub").mkdir(parents=True)
    (stack.project / "thesis/a.txt").write_text("work")
    told = error(stack.run(*LOCK, "--out", "thesis", "--json", status=2))
    assert "a.txt, sub" in told["why"]
    assert "no folder for a lock" in error(stack.run(*LOCK, "--out", ".", "--json", status=2))["what"]
    assert (stack.project / "thesis/a.txt").read_text() == "work"
    (stack.project / "empty").mkdir()
    stack.run(*LOCK, "--out", "empty")
    stack.run(*LOCK, "--out", "empty", "--upgrade")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--allow", "nonsense"), "no check has that code"),
        (("--pin", "lib=1.0", "--pin", "LIB=1.0", "--name", "x"), "pinned twice"),
        (("--pin", "bogus=1"), "no component 'bogus' to pin"),
        (("--check", "--pin", "lib=1.0"), "--check does not go with --pin"),
        (("--all", "--name", "x"), "--all does not go with --name"),
        (("--as-of", "2999-01-01"), "is not over yet"),
        (("--as-of", "2025-2-1"), "is no date"),
    ],
)
def test_words_that_would_mislead_are_usage_errors(stack: Any, words: tuple[str, ...], said: str) -> None:
    assert said in stack.run(*LOCK, *words, status=2).stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_PRERELEASE", "allow"),
        ("UV_RESOLUTION", "lowest"),
        ("UV_NO_SOURCES", "1"),
        ("UV_FROZEN", "1"),
        ("UV_PYTHON", "3.12"),
        ("RUST_LOG", "debug"),
    ],
)
def test_variables_of_uv_change_no_lock(stack: Any, name: str, value: str) -> None:
    stack.run(*LOCK, "--as-of", "2025-04-01")
    before = files_of(stack, "s")
    stack.env[name] = value
    stack.run(*LOCK, "--as-of", "2025-04-01", "--upgrade")
    assert files_of(stack, "s") == before


@pytest.mark.parametrize("place", ["user", "system"])
@pytest.mark.parametrize(
    "settings",
    [
        {"prerelease": "allow"},
        {"resolution": "lowest"},
        {"constraint-dependencies": ["dep<2"]},
        {"exclude-newer-package": {"lib": "2020-01-01T00:00:00Z"}},
        {"dependency-metadata": [{"name": "lib", "version": "1.0", "requires-dist": []}]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_own_settings_of_uv_say_where_packages_are_and_change_no_lock(
    stack: Any, tmp_path: Path, settings: dict[str, Any], place: str
) -> None:
    stack.run(*LOCK, "--as-of", "2025-04-01")
    before = files_of(stack, "s")
    index = {"index": [{"url": stack.env.pop("UV_DEFAULT_INDEX"), "default": True}]}
    (tmp_path / "config/uv").mkdir(parents=True)
    (tmp_path / "config/uv/uv.toml").write_text(tomlkit.dumps({**settings, **index}))
    stack.env |= {"XDG_CONFIG_HOME": str(tmp_path / "none"), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    stack.env["XDG_CONFIG_HOME" if place == "user" else "XDG_CONFIG_DIRS"] = str(tmp_path / "config")
    stack.run(*LOCK, "--as-of", "2025-04-01", "--upgrade")
    assert files_of(stack, "s") == before


def test_without_a_base_the_one_of_the_packages_cuda_is_taken(own: Any, wheel: Callable[..., None]) -> None:
    write_base(own.project, "small-cu126", cuda="12.6", glibc="2.35")
    wheel("lib", "1.0", requires=("core-cu12",))
    wheel("core_cu12", "1.0")
    builds = [{"target": "gpu", "bases": [GPU_BASE, "small-cu126"], "default_base": GPU_BASE}]
    write_stack(own.project, "s", {"lib": {}}, builds=builds)
    done = own.run(*LOCK, "--json")
    assert result(done)["base"] == "small-cu126"
    assert f"of another CUDA than base {GPU_BASE} has: taking small-cu126" in done.stderr
    assert "[cuda-mixed]" in error(own.run(*LOCK, "--base", GPU_BASE, "--json", status=5))["why"]


def test_a_target_whose_fleet_changed_makes_its_locks_old(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0")
    write_stack(own.project, "s", {"lib": {}}, target="gpu", base=GPU_BASE)
    own.run(*LOCK)
    own.run("lock", "--check")
    write_target(own.project, "gpu", sm=("90",), driver="550.54.15")
    own.run("lock", "--check", status=5)
    assert "[driver]" in error(own.run(*LOCK, "--json", status=5))["why"]


def test_diff_and_check_without_a_stack_are_about_every_lock(stack: Any, wheel: Callable[..., None]) -> None:
    stack.run(*LOCK)
    stack.run(*LOCK, "--pin", "dep=1.0", "--name", "x", status=2)  # dep is no component
    stack.run(*LOCK, "--pin", "lib=1.0", "--name", "x")
    wheel("lib", "1.1", requires=("dep",))
    told = result(stack.run("lock", "--diff", "--json"))["locks"]
    changed = {Path(lock["path"]).parent.name: [item["to"] for item in lock["changes"]] for lock in told}
    assert changed == {"s": ["1.1"], "x": []}
    assert len(result(stack.run("lock", "--check", "--stack", "s", "--json"))["checked"]) == 2
    assert len(result(stack.run("lock", "--check", "--name", "x", "--json"))["checked"]) == 1
    assert lock_of(stack, "x", BASE).components["lib"].version == "1.0"


@pytest.mark.parametrize("words", [("--as-of", "2025-04-01"), ("--torch-build", "cu130"), ("--allow", "glibc")])
def test_words_of_a_command_line_replace_no_lock_that_was_made_without(stack: Any, words: tuple[str, ...]) -> None:
    stack.run(*LOCK)
    before = files_of(stack, "s")
    told = error(stack.run(*LOCK, *words, "--upgrade", "--json", status=2))
    assert told["what"].startswith(f"{' '.join(words)} would make another lock of s on {BASE} than the one that is")
    assert "was made without" in told["why"]
    assert "--name s." in told["fix"]
    assert files_of(stack, "s") == before
    # To another place, and where it is named to this one too.
    stack.run(*LOCK, *words, "--name", "x")
    stack.run(*LOCK, *words, "--out", "elsewhere")
    assert files_of(stack, "s") == before
    stack.run(*LOCK, *words, "--name", "s")
    assert files_of(stack, "s") != before
    # That one is made again by the same words, not by others, and by none.
    assert result(stack.run(*LOCK, *words, "--json"))["built"] is False
    told = error(stack.run(*LOCK, "--allow", "forks", "--json", status=2))
    assert f"was made with {' '.join(words)}" in told["why"]
    stack.run(*LOCK)
    assert lock_of(stack, "s").inputs.allow == ()


def test_words_that_say_what_holds_anyway_replace_a_lock(stack: Any) -> None:
    stack.run(*LOCK)
    stack.run(*LOCK, "--torch-build", "cpu", "--as-of", "now")


def test_words_make_the_first_lock_in_a_place(stack: Any) -> None:
    stack.run(*LOCK, "--allow", "glibc")
    assert lock_of(stack, "s").inputs.allow == ("glibc",)


def test_diff_with_a_place_without_a_lock_says_how_to_make_one_there(stack: Any) -> None:
    told = error(stack.run(*LOCK, "--diff", "--out", "nowhere", "--json", status=3))
    assert "envbuild lock --stack STACK --base BASE --out nowhere" in told["fix"]
    told = error(stack.run(*LOCK, "--diff", "--json", status=3))
    assert f"envbuild lock --stack s --base {BASE}" in told["fix"]
    assert "--target" not in told["fix"]


def test_pins_go_to_a_named_place(stack: Any) -> None:
    components = {"lib": {}, "dep": {"version": ">=1"}}
    write_stack(stack.project, "s", components, anchor="lib")
    assert "pins need a name" in error(stack.run(*LOCK, "--pin", "dep=1.0", "--json", status=2))["what"]
    locked = result(stack.run(*LOCK, "--pin", "dep=1.0", "--out", "elsewhere", "--json"))
    assert (locked["components"]["dep"], Path(locked["path"]).name) == ("1.0", "elsewhere")
    assert not (stack.project / "lockfiles").exists()
