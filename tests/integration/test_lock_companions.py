"""What belongs to a release of the anchor, from envs/companions/: real uv and an index of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import error, lock_of, result
from helpers.stack_files import write_stack

TABLE = """\
summary = "lib and what belongs to it"
[[releases]]
versions = "==1.*"
components = { dep = "<2", absent = "==1" }
evidence = "seen"
[[releases]]
versions = "==2.0"
components = { dep = "==2.*" }
evidence = "seen"
"""


@pytest.fixture
def table(own: Any, wheel: Callable[..., None]) -> Path:
    """Stack `s` of `lib` 1.0, 1.1, 2.0, 3.0 and `dep` 1.0 to 3.0, whose table says which belong together."""
    components: dict[str, Any] = {"lib": {"version": ">=1"}, "dep": {}, "other": {}}
    write_stack(own.project, "s", components, anchor="lib")
    for version in ("1.0", "1.1", "2.0", "3.0"):
        wheel("lib", version)
    for version in ("1.0", "1.5", "2.0", "2.1", "3.0"):
        wheel("dep", version)
    wheel("other", "1.0")
    path: Path = own.project / "envs/companions/lib.toml"
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    return path


def versions(own: Any, name: str) -> tuple[str, str]:
    components = lock_of(own, name).components
    return components["lib"].version, components["dep"].version


@pytest.mark.parametrize(
    ("pin", "actual", "because"),
    [
        ("1.0", ("1.0", "1.5"), "envs/companions/lib.toml for lib 1.0"),
        ("2.0", ("2.0", "2.1"), "envs/companions/lib.toml for lib 2.0"),
        ("3.0", ("3.0", "3.0"), "the stack's file"),
        # A range is held to the releases that its companions are for.
        (">=1,<2", ("1.1", "1.5"), "envs/companions/lib.toml for lib >=1,<2"),
        (">=1,!=3.0", ("2.0", "2.1"), "envs/companions/lib.toml for lib >=1,!=3.0"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_release_of_the_anchor_brings_its_companions(
    own: Any, pin: str, actual: tuple[str, str], because: str
) -> None:
    own.run("lock", "--stack", "s", "--pin", f"lib={pin}", "--name", "x")
    assert versions(own, "x") == actual
    components = lock_of(own, "x").components
    assert components["dep"].because == because
    assert components["other"].because == "the stack's file"


@pytest.mark.usefixtures("table")
def test_a_range_never_gets_companions_of_another_release(own: Any, wheel: Callable[..., None]) -> None:
    """lib 2.0 does not resolve; uv must not go back to 1.1 with what belongs to 2.0."""
    wheel("lib", "2.0", requires=("nobody-has-this",))
    refused = error(own.run("lock", "--stack", "s", "--pin", "lib=>=1,<3", "--name", "x", "--json", status=4))
    assert "nobody-has-this" in refused["why"]


@pytest.mark.usefixtures("table")
def test_the_release_is_the_one_of_the_as_of_moment(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "2.0", "2025-06-01T00:00:00Z")
    own.run("lock", "--stack", "s", "--pin", "lib=>=1,<3", "--as-of", "2025-03-01", "--name", "x")
    assert versions(own, "x") == ("1.1", "1.5")


@pytest.mark.usefixtures("table")
def test_pins_and_the_stacks_file_win_over_the_table(own: Any) -> None:
    own.run("lock", "--stack", "s", "--pin", "lib=1.0", "--pin", "dep=3.0", "--name", "x")
    assert versions(own, "x") == ("1.0", "3.0")
    assert lock_of(own, "x").components["dep"].because == "pinned by the user"
    write_stack(own.project, "s", {"lib": {"version": ">=1"}, "dep": {"version": "<3"}}, anchor="lib")
    own.run("lock", "--stack", "s", "--pin", "lib=1.0", "--name", "x")
    assert versions(own, "x") == ("1.0", "2.1")


def test_a_table_is_an_input_of_the_locks_that_it_decides(own: Any, table: Path) -> None:
    write_stack(own.project, "t", {"lib": {"version": "==1.0"}, "dep": {"version": "==1.0"}}, anchor="lib")
    own.run("lock", "--stack", "t")
    own.run("lock", "--stack", "s", "--pin", "lib=1.0")
    own.run("lock", "--check")
    table.write_text(TABLE.replace('dep = "<2"', 'dep = "==1.0"'))
    refused = error(own.run("lock", "--check", "--json", status=5))
    assert refused["what"] == "1 of 2 locks are out of date or were edited"
    assert "lockfiles/s-1.0/" in refused["why"]
    own.run("lock", "--stack", "s", "--pin", "lib=1.0")
    assert versions(own, "s-1.0") == ("1.0", "1.0")


def test_nemo_release_takes_the_shipped_table(own: Any, wheel: Callable[..., None]) -> None:
    """`envbuild lock --nemo 2.7.3`, with the table that ships."""
    components: dict[str, Any] = {"nemo-toolkit": {"git": "https://x.invalid/n", "ref": "main"}, "megatron-core": {}}
    write_stack(own.project, "nemo", components, anchor="nemo-toolkit", driver="mcore")
    wheel("nemo_toolkit", "2.7.3")
    for version in ("0.14.0", "0.15.0", "0.15.3", "0.16.1"):
        wheel("megatron_core", version)
    locked = result(own.run("lock", "--nemo", "2.7.3", "--json"))
    assert locked["components"] == {"nemo-toolkit": "2.7.3", "megatron-core": "0.15.3"}
    component = lock_of(own, "nemo-2.7.3").components["megatron-core"]
    assert (component.asked, component.because) == (
        ">=0.15,<0.16",
        "envs/companions/nemo-toolkit.toml for nemo-toolkit 2.7.3",
    )
