"""Companions held to what the components that use them declare: an index of the test's own, and the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import error, files_of, lock_of, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import write_stack
from helpers.upstreams import Upstream, project_files

MOVED = ("lock", "--stack", "s", "--name", "x", "--json")


def write(own: Any, **dep: Any) -> None:
    """Stack `s`: `lib` 2.0, which uses `dep`, and `dep-torch`, which belongs to `dep`."""
    lib = {"version": "==2.0", "uses": ["dep"]}
    write_stack(own.project, "s", {"lib": lib, "dep": dep, "dep-torch": dep, "dev": {}})


@pytest.fixture
def stack(own: Any, wheel: Callable[..., Path]) -> Any:
    """Of `lib` 1.0, 2.0 and 3.0 each declares another range of `dep` for its extra dev."""
    write(own, version="==2.1")
    for version, declared in (("1.0", ">=1.0a0,<2"), ("1.5", ">=1.0,<1.1"), ("2.0", ">=2,<3"), ("3.0", "")):
        requires = (f"dep[torch]{declared} ; extra == 'dev'", "dev")
        wheel("lib", version, requires=requires, extras=("dev",))
    for version in ("1.0", "1.4", "1.5rc1", "2.0", "2.1", "3.0"):
        wheel("dep", version, requires=(f"dep-torch=={version} ; extra == 'torch'",), extras=("torch",))
        wheel("dep_torch", version, requires=(f"dep-core=={version}",))
        wheel("dep_core", version)
    wheel("dev", "1.0")
    return own


def versions_of(own: Any, name: str = "x") -> dict[str, tuple[str, str]]:
    components = lock_of(own, name).components
    return {
        name: (component.version, component.because) for name, component in components.items() if name.startswith("dep")
    }


def test_a_pin_takes_its_companions_in_the_place_of_the_stacks(stack: Any) -> None:
    done = stack.run(*MOVED, "--pin", "lib=1.0")
    assert result(done)["components"] == {"lib": "1.0", "dep": "1.4", "dep-torch": "1.4", "dev": "1.0"}
    instead = "in the place of the stack's ==2.1"
    assert versions_of(stack) == {
        "dep": ("1.4", f"declared by lib 1.0 (extra dev), {instead}"),
        "dep-torch": ("1.4", f"declared by dep 1.4 (extra torch), {instead}"),
    }
    assert f"dep <2,>=1.0a0: declared by lib 1.0 (extra dev), {instead}" in done.stderr
    assert lock_of(stack, "x").components["dep"].asked == "<2,>=1.0a0"
    stack.run("lock", "--check")


def test_a_range_that_is_pinned_takes_the_companions_of_its_release(stack: Any) -> None:
    stack.run(*MOVED, "--pin", "lib=<2,!=1.5")
    assert {name: version for name, (version, _) in versions_of(stack).items()} == {"dep": "1.4", "dep-torch": "1.4"}


def test_another_release_than_the_range_was_read_of_is_refused(stack: Any, wheel: Callable[..., Path]) -> None:
    """Uv takes lib 1.5 by itself, and the rest of the stack holds it to 1.0."""
    wheel("lib", "1.6", requires=("dep<1.1 ; extra == 'dev'", "dev>1"), extras=("dev",))
    wheel("lib", "1.0", requires=("dep>=1.2,<2 ; extra == 'dev'", "dev"), extras=("dev",))
    refused = error(stack.run(*MOVED, "--pin", "lib=<2,!=1.5", status=5))
    assert "] lib 1.0 declares dep<2,>=1.2 (extra dev); what was declared by lib 1.6" in refused["why"]
    assert "--pin lib=VERSION" in refused["why"]


@pytest.mark.parametrize("pin", ["3.0", "2.0"])
def test_a_release_that_declares_no_other_range_leaves_the_stacks_companions(stack: Any, pin: str) -> None:
    stack.run(*MOVED, "--pin", f"lib={pin}")
    assert versions_of(stack) == dict.fromkeys(("dep", "dep-torch"), ("2.1", "the stack's file"))


def test_without_a_pin_the_stacks_file_wins_over_what_is_declared(stack: Any) -> None:
    write(stack, version="==3.0")
    stack.run("lock", "--stack", "s")
    assert versions_of(stack, "s") == dict.fromkeys(("dep", "dep-torch"), ("3.0", "the stack's file"))
    # Nor with a pin of the very release that the stack's file is about.
    stack.run(*MOVED, "--pin", "lib=2.0", "--pin", "dev=1.0")
    assert versions_of(stack) == dict.fromkeys(("dep", "dep-torch"), ("3.0", "the stack's file"))


def test_a_range_of_the_stack_is_kept_as_far_as_it_goes(stack: Any) -> None:
    write(stack, version=">=1.4")
    stack.run(*MOVED, "--pin", "lib=1.0")
    assert versions_of(stack)["dep"] == ("1.4", "declared by lib 1.0 (extra dev), within the stack's >=1.4")
    stack.run(*MOVED, "--pin", "lib=1.5")
    assert versions_of(stack)["dep"] == ("1.0", "declared by lib 1.5 (extra dev), in the place of the stack's >=1.4")


def test_declared_range_decides_a_companion_that_nothing_else_names(stack: Any) -> None:
    write(stack)
    stack.run("lock", "--stack", "s")
    assert versions_of(stack, "s") == {
        "dep": ("2.1", "declared by lib 2.0 (extra dev)"),
        "dep-torch": ("2.1", "declared by dep 2.1 (extra torch)"),
    }
    stack.run("lock", "--check")


def test_a_table_wins_over_what_is_declared(stack: Any) -> None:
    lib = {"version": "==2.0", "uses": ["dep"]}
    write_stack(stack.project, "s", {"lib": lib, "dep": {}, "dev": {}}, anchor="lib")
    table = stack.project / "envs/companions/lib.toml"
    table.parent.mkdir(parents=True)
    entry = 'versions = "==2.0"\ncomponents = { dep = "==1.4" }\nevidence = "seen"\n'
    table.write_text(f'summary = "lib"\n[[releases]]\n{entry}')
    stack.run("lock", "--stack", "s")
    assert versions_of(stack, "s") == {"dep": ("1.4", "envs/companions/lib.toml for lib ==2.0")}


def test_an_override_wins_over_what_is_declared(stack: Any) -> None:
    lib = {"version": "==2.0", "uses": ["dep"]}
    overrides = {"dep": {"version": "==3.0", "reason": "seen", "against": ["lib"]}}
    write_stack(stack.project, "s", {"lib": lib, "dep": {}, "dev": {}}, overrides=overrides)
    stack.run("lock", "--stack", "s")
    assert versions_of(stack, "s") == {"dep": ("3.0", "the stack's file")}


@pytest.mark.parametrize("own_pin", [(), ("--pin", "lib=1.0")])
def test_a_pin_of_the_companion_wins_and_is_refused_outside_of_the_range(stack: Any, own_pin: tuple[str, ...]) -> None:
    command = (*MOVED, *own_pin, "--pin", "dep=3.0")
    refused = error(stack.run(*command, status=5))
    declared = "lib 1.0 declares dep<2,>=1.0a0" if own_pin else "lib 2.0 declares dep<3,>=2"
    line = f"{declared} (extra dev); the user's pin puts dep 3.0 there"
    assert f"] {line}" in refused["why"]
    assert "Pin a dep in that range, or another lib." in refused["why"]
    assert not (stack.project / "lockfiles/x").exists()
    stack.run(*command, "--allow", "override-range")
    lock = lock_of(stack, "x")
    assert lock.overridden == (line,)
    assert [text.partition(": ")[2] for text in lock.allowed] == [line]
    # What belongs to the pinned one comes with it.
    assert versions_of(stack) == {
        "dep": ("3.0", "pinned by the user"),
        "dep-torch": ("3.0", "declared by dep 3.0 (extra torch), in the place of the stack's ==2.1"),
    }


def test_pin_equal_to_the_stack_stays_next_to_another_pin(stack: Any) -> None:
    refused = error(stack.run(*MOVED, "--pin", "lib=1.0", "--pin", "dep=2.1", status=5))
    assert "the user's pin puts dep 2.1 there" in refused["why"]


def test_a_declared_range_without_a_release_is_the_pins_part(stack: Any, wheel: Callable[..., Path]) -> None:
    wheel("lib", "1.2", requires=("dep==9 ; extra == 'dev'",), extras=("dev",))
    refused = error(stack.run(*MOVED, "--pin", "lib=1.2", status=4))
    assert "dep==9" in refused["why"]
    assert "Of the pins, lib=1.2 takes part: without it the rest resolves." in refused["why"]


def test_an_sdist_declares_too(stack: Any, index: SimpleIndex, tmp_path: Path) -> None:
    requires = ("dep>=1,<1.1 ; extra == 'dev'",)
    index.add(make_sdist(tmp_path, "lib", "1.9", requires=requires, extras=("dev",)), "2025-01-01T00:00:00Z")
    stack.run(*MOVED, "--pin", "lib=1.9")
    assert versions_of(stack)["dep"] == ("1.0", "declared by lib 1.9 (extra dev), in the place of the stack's ==2.1")


def test_a_commit_declares_too(nemo: Any, upstream: Upstream) -> None:
    files = project_files("megatron-core", "0.14.0", "megatron.core")
    files["pyproject.toml"] += "[project.optional-dependencies]\ndev = ['packaging>=24.0,<24.3']\n"
    commit = upstream.megatron.commit("main", "2025-03-02T00:00:00Z", files)
    path = nemo.project / "envs/stacks/nemo.toml"
    path.write_text(path.read_text().replace('["megatron.core"]', '["megatron.core"]\nuses = ["packaging"]'))
    # packaging 25.0 is the newest of that day.
    pins = ("--nemo", "v2.1.0", "--pin", f"megatron-core={commit}", "--as-of", "2025-05-01")
    nemo.run("lock", *pins, "--name", "x")
    component = lock_of(nemo, "x").components["packaging"]
    because = f"declared by megatron-core {commit[:12]} (extra dev), within the stack's >=24"
    assert (component.version, component.because) == ("24.2", because)


@pytest.mark.slow
def test_megatron_core_declares_the_transformer_engine_of_stack_mcore(
    tool: Any, site_cache: Path, tmp_path: Path
) -> None:
    """The shipped stack on the real index.

    megatron-core 0.15.3 declares >=2.9.0a0,<2.10 for its extra dev; the stack has 2.11.0, for its 0.16.1.
    """
    own, base = type(tool)(tmp_path / "project", site_cache), "debian12-cu130"
    own.project.mkdir()
    own.run("lock", "--stack", "mcore", "--base", base, "--pin", "megatron-core=0.15.3", "--name", "x")
    components = lock_of(own, "x", base).components
    assert components["transformer-engine"].version.startswith("2.9.")
    assert components["transformer-engine-torch"].version == components["transformer-engine"].version
    assert components["transformer-engine"].because.startswith("declared by megatron-core 0.15.3 (extra dev), ")
    assert "\ntransformer-engine-cu13==2.9." in files_of(own, "x", base)["compile.txt"]


@pytest.mark.parametrize("agrees", [True, False], ids=["an older pair agrees", "no pair agrees"])
def test_two_components_that_pin_each_other(own: Any, wheel: Callable[..., Path], agrees: bool) -> None:
    components = {"left": {"uses": ["right"]}, "right": {"uses": ["left"]}}
    write_stack(own.project, "s", components, anchor="left")
    wheel("left", "2.0", requires=("right==2.0",))
    wheel("right", "2.0", requires=("left==1.0",))
    wheel("left", "1.0", requires=("right==1.0",))
    wheel("right", "1.0", requires=("left==1.0" if agrees else "left==2.0",))
    if agrees:
        assert result(own.run("lock", "--stack", "s", "--json"))["components"] == {"left": "1.0", "right": "1.0"}
    else:
        refused = error(own.run("lock", "--stack", "s", "--json", status=4))
        assert "left" in refused["why"]
        assert "right" in refused["why"]
        assert ": envbuild lock --stack s " in refused["fix"].splitlines()[-1]
        assert not (own.project / "lockfiles").exists()
