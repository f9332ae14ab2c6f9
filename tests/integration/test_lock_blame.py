"""Pins that do not resolve: which of them take part. Every answer is uv's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.errors import NetworkError, ResolutionError
from envbuild.core.progress import SilentReporter
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions, lock_stack
from envbuild.lock.lockfile import read_lock
from envbuild.lock.resolve import conflicts
from envbuild.store.local import LocalStore


@pytest.fixture
def three(own: Any, wheel: Callable[..., None]) -> Any:
    """Stack `s` of `lib`, `dep` and `other`; lib 2 takes dep below 2, and dep 2 takes lib below 2."""
    write_stack(own.project, "s", {"lib": {}, "dep": {}, "other": {}})
    for version in ("1.0", "1.1"):
        wheel("lib", version)
        wheel("dep", version)
        wheel("other", version)
    wheel("lib", "2.0", requires=("dep<2",))
    wheel("dep", "2.0")
    return own


def lock(*pins: str, name: str = "x") -> tuple[str, ...]:
    return ("lock", "--stack", "s", *(word for pin in pins for word in ("--pin", pin)), "--name", name, "--json")


def next_words(refused: dict[str, Any], title: str) -> list[str]:
    """The words of the command that a refusal ends with."""
    before, _, command = refused["fix"].splitlines()[-1].partition(": ")
    assert before == title
    words: list[str] = command.split()
    return words


def test_pins_that_exclude_each_other_are_named(three: Any) -> None:
    refused = error(three.run(*lock("other=1.0", "lib=2.0", "dep=2.0"), status=4))
    uvs, _, ours = refused["why"].partition("Of the pins, ")
    assert "unsatisfiable" in uvs
    assert "dep<2" in uvs
    assert ours.splitlines() == [
        "lib=2.0, dep=2.0 exclude each other: without any one of them the rest resolves.",
        "other: not involved.",
    ]
    without = "envbuild lock --stack s --pin other=1.0 --pin lib=2.0 --name x"
    words = next_words(refused, "Without --pin dep=2.0 other releases are tried")
    assert words == without.split()
    three.run(*words[1:])


def test_one_pin_against_what_the_stack_says(three: Any, wheel: Callable[..., None]) -> None:
    write_stack(three.project, "s", {"lib": {"version": "==2.0"}, "dep": {}, "other": {}})
    refused = error(three.run(*lock("other=1.0", "dep=2.0"), status=4))
    assert "Of the pins, dep=2.0 takes part: without it the rest resolves." in refused["why"]


def test_pinned_version_without_a_release(three: Any) -> None:
    refused = error(three.run(*lock("dep=1.7"), status=4))
    assert refused["why"].startswith("Releases for the base's Python: 1.1 (the newest before it), 2.0")
    assert "dep=1.1" in next_words(refused, "Next, with the nearest release")


def test_a_stack_that_does_not_resolve_without_pins_either(three: Any) -> None:
    requirements = {"dep": {"version": "<1", "reason": "a"}}
    write_stack(three.project, "s", {"lib": {}, "other": {}}, requirements=requirements)
    refused = error(three.run(*lock("lib=1.0"), status=4))
    assert refused["why"].endswith("Tried: any release of lib that the stack allows. That does not resolve either.")
    refused = error(three.run("lock", "--stack", "s", "--json", status=4))
    assert "pins" not in refused["why"]


def test_pins_of_the_compile_phase(own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path) -> None:
    """No other release is built to learn what it declares."""
    components = {"kernels": {"phase": "compile"}, "dep": {}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)
    for version in ("1.0", "1.3"):
        index.add(make_sdist(tmp_path, "kernels", version, requires=("dep>=3",)), OLD)
    for version in ("1.0", "2.0", "3.0"):
        wheel("dep", version)
    wheel("setuptools", "80.0")
    refused = error(own.run(*lock("kernels=1.3", "dep=2.0"), status=4))
    assert "kernels=1.3, dep=2.0 exclude each other" in refused["why"]
    assert "any one of them the rest resolves" in refused["why"]


# ---- bounds, and failures among the attempts


@pytest.fixture
def explained(three: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ResolutionError]:
    """Locks two pins that exclude each other, in this process."""
    for name, value in three.env.items():
        monkeypatch.setenv(name, value)

    def run() -> ResolutionError:
        selection = Selection(Catalog.open(three.project), "s", BASE, "cpu")
        store, path = LocalStore(three.cache, SilentReporter()), three.project / "there"
        with pytest.raises(ResolutionError) as caught:
            lock_stack(
                selection,
                LockRequest(pins={"lib": "2.0", "dep": "2.0"}),
                LockOptions(path=path),
                Context(store=store, site=load_site(), reporter=SilentReporter()),
            )
        assert "No solution found" in caught.value.why
        assert "dep<2" in caught.value.why
        assert caught.value.what == f"cannot resolve stack s on {BASE}"
        return caught.value

    return run


def test_an_attempt_that_does_not_end_is_stopped(
    explained: Callable[[], ResolutionError], index: SimpleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "MOST_SECONDS", 2.0)
    asked = conflicts.resolve

    def resolve(folder: Path, *more: Any) -> Any:
        # The index answers nothing any more.
        index.after["/simple/lib/"] = "/never"
        monkeypatch.setenv("UV_CACHE_DIR", str(folder / "cache"))
        return asked(folder, *more)

    monkeypatch.setattr(conflicts, "resolve", resolve)
    assert explained().why.endswith("Which pins take part was not found out within 2 s.")
    index.requested.append("/never")


def test_a_failure_among_the_attempts_does_not_hide_the_error(
    explained: Callable[[], ResolutionError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: object, **more: object) -> None:
        raise NetworkError("the index is gone", why="a planted fault")

    monkeypatch.setattr(conflicts, "resolve", gone)
    error = explained()
    assert error.why.endswith("Which pins take part could not be found out: the index is gone")
    assert "Relax a version" in error.fix


# ---- the real index


@pytest.mark.slow
def test_transformer_engine_and_mamba_on_the_real_index(tool: Any, tmp_path: Path) -> None:
    """Transformer Engine 2.20.2 needs a tvm-ffi that mamba-ssm 2.3.2.post1 excludes; 2.3.1 does not."""
    project = tmp_path / "project"
    write_base(project, GPU_BASE, cuda="13.0", glibc="2.39")
    components = {
        "torch": {"version": "==2.11.0"},
        "transformer-engine-torch": {"phase": "compile"},
        "mamba-ssm": {"phase": "compile"},
        "packaging": {},
    }
    write_stack(project, "s", components, target="h200", base=GPU_BASE, as_of="2026-11-01")
    own = type(tool)(project, tmp_path / "cache")
    own.env = {"UV_FIND_LINKS": "", "PIP_FIND_LINKS": "", "UV_PYTHON_DOWNLOADS": "never"}
    pins = ("transformer-engine-torch=2.20.2", "mamba-ssm=2.3.2.post1", "packaging=25.0")
    refused = error(own.run(*lock(*pins), status=4))
    assert "Of the pins, transformer-engine-torch=2.20.2, mamba-ssm=2.3.2.post1 exclude each other" in refused["why"]
    assert "packaging: not involved." in refused["why"]
    pins = ("transformer-engine-torch=2.20.2", "mamba-ssm=2.3.1", "packaging=25.0")
    # That Transformer Engine needs nvidia-cutlass-dsl, whose libraries for CUDA 12 mix with nothing.
    assert result(own.run(*lock(*pins)))["components"]["mamba-ssm"] == "2.3.1"
    assert "nvidia-cutlass-dsl-libs-cu12" in read_lock(project / "lockfiles/x" / GPU_BASE).packages()
    assert os.listdir(project / "lockfiles") == ["x"]
