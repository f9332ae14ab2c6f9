"""Releases for the base's CUDA, also where the day had none yet: real uv and an index of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.lock_runs import error, files_of, lock_of, result
from helpers.stack_files import GPU_BASE, write_base, write_stack

EARLIER_BASE = "small-cu126"
LOCK = ("lock", "--stack", "s", "--json")
# As lib 1.0 came out, and as lib 2.0 did: before and after torch for CUDA 13.
BEFORE, AFTER = "lib=1.0", "lib=2.0"
TORCH = {"releases_for_cuda": {"12": "<2.11", "13": ">=2.11"}, "released_with": ["torchaudio", "torchvision"]}


def stack_of(own: Any, bases: tuple[str, ...] = (GPU_BASE, EARLIER_BASE), **torch: Any) -> None:
    write_stack(
        own.project,
        "s",
        {"lib": {"version": ">=1"}, "torch": TORCH | torch},
        anchor="lib",
        builds=[{"target": "gpu", "bases": list(bases), "default_base": GPU_BASE}],
        requirements={"tools": {"reason": "uv takes its newest first, which torch 2.11 does not go with"}},
    )


@pytest.fixture
def moving(own: Any, wheel: Callable[..., None]) -> Any:
    """Stack `s` of lib and of torch, of which 2.10 is for CUDA 12, and 2.11, that came months later, for CUDA 13."""
    write_base(own.project, EARLIER_BASE, cuda="12.6", glibc="2.35")
    stack_of(own)
    uploads: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
        "2025-01-01": [("tools", "1.0", ()), ("tools", "2.0", ()), ("words", "1.0", ())],
        "2025-03-01": [
            ("nvidia_cublas_cu12", "12.6.1", ()),
            ("torch", "2.10.0", ("nvidia-cublas-cu12", "words")),
            ("torchvision", "0.25.0", ("torch==2.10.0",)),
        ],
        "2025-04-01": [("nvidia_cublas", "13.0.1", ()), ("lib", "1.0", ("torchvision",))],
        "2025-09-01": [
            ("nvidia_cublas", "13.1.0", ()),
            ("words", "2.0", ()),
            ("torch", "2.11.0", ("nvidia-cublas==13.1.0", "words", "tools<2")),
            ("torchvision", "0.26.0", ("torch==2.11.0",)),
        ],
        "2025-10-01": [("torch", "2.12.0", ("nvidia-cublas>=13.1", "words")), ("nvidia_cublas", "13.2.0", ())],
        "2025-11-01": [("lib", "2.0", ("torchvision",))],
    }
    for day, items in uploads.items():
        for name, version, requires in items:
            wheel(name, version, f"{day}T12:00:00Z", requires=requires)
    return own


def versions(own: Any, name: str, base: str = GPU_BASE) -> dict[str, str]:
    by_name: dict[str, str] = {}
    for line in files_of(own, name, base)["main.txt"].splitlines():
        if line[:1].isalpha():
            package, _, version = line.split(" ")[0].partition("==")
            by_name[package] = version
    return by_name


def test_first_release_for_the_bases_cuda_is_exempt_with_what_it_cannot_do_without(moving: Any) -> None:
    done = moving.run(*LOCK, "--pin", BEFORE, "--base", GPU_BASE, "--name", "x")
    assert versions(moving, "x") == {
        "lib": "1.0",
        "nvidia-cublas": "13.1.0",
        "tools": "1.0",
        "torch": "2.11.0",
        "torchvision": "0.26.0",
        "words": "1.0",  # 2.0 came with torch 2.11, which does not need it
    }
    lock = lock_of(moving, "x", GPU_BASE)
    assert lock.inputs.as_of == "2025-04-15T12:00:00Z"
    assert lock.components["torch"].because == "the stack's file: releases for CUDA 13"
    reason = "as of 2025-04-15T12:00:00Z no release of torch is for CUDA 13; torch 2.11.0 is the first"
    assert lock.exempt == result(done)["exempt"]
    assert lock.exempt == {
        "nvidia-cublas": "until 2025-09-02T00:00:00Z: torch 2.11.0 needs 13.1.0",
        "torch": f"until 2025-09-02T00:00:00Z: {reason}",
        "torchvision": "until 2025-09-02T00:00:00Z: a release of it needs one of torch, and torch 2.11.0 is exempt",
    }
    assert f"exempt from the as-of moment: torch until 2025-09-02T00:00:00Z: {reason}" in done.stderr
    moving.run("lock", "--check")


def test_exemption_gives_the_same_lock_on_another_day(moving: Any, wheel: Callable[..., None]) -> None:
    command = (*LOCK, "--pin", BEFORE, "--base", GPU_BASE)
    moving.run(*command, "--name", "x")
    for name, version in (("torch", "2.11.1"), ("nvidia_cublas", "13.1.0.1"), ("torchvision", "0.26.1")):
        wheel(name, version, "2025-12-01T00:00:00Z")
    moving.run(*command, "--name", "y")
    assert files_of(moving, "y", GPU_BASE) == files_of(moving, "x", GPU_BASE)


def test_without_a_base_the_one_of_the_days_cuda_is_taken_and_nothing_is_exempt(moving: Any) -> None:
    done = moving.run(*LOCK, "--pin", BEFORE, "--name", "x")
    assert result(done)["base"] == EARLIER_BASE
    assert f"of another CUDA than base {GPU_BASE} has: taking {EARLIER_BASE}" in done.stderr
    assert versions(moving, "x", EARLIER_BASE)["torch"] == "2.10.0"
    assert lock_of(moving, "x", EARLIER_BASE).exempt == {}
    assert lock_of(moving, "x", EARLIER_BASE).fallback_from == GPU_BASE
    # From then on it is the lock that commands take: nothing is resolved on the default base again.
    again = moving.run(*LOCK, "--pin", BEFORE, "--name", "x")
    assert (result(again)["built"], result(again)["base"]) == (False, EARLIER_BASE)
    assert "resolve" not in again.stderr
    exported = moving.run("export", "--stack", "s", "--name", "x", "--format", "requirements")
    assert "torch==2.10.0" in exported.stdout
    assert f"no lock on the default base {GPU_BASE}: taking the one on {EARLIER_BASE}" in exported.stderr
    difference = moving.run("lock", "--stack", "s", "--pin", BEFORE, "--name", "x", "--diff")
    assert difference.stdout.startswith("no change: lock ")
    # --upgrade begins with the default base again.
    upgraded = moving.run(*LOCK, "--pin", BEFORE, "--name", "x", "--upgrade")
    assert f"taking {EARLIER_BASE}" in upgraded.stderr
    # Once it has a lock, that one is taken.
    moving.run(*LOCK, "--pin", BEFORE, "--base", GPU_BASE, "--name", "x")
    exported = moving.run("export", "--stack", "s", "--name", "x", "--format", "requirements")
    assert "torch==2.11.0" in exported.stdout


@pytest.mark.parametrize(("base", "torch", "tools"), [(GPU_BASE, "2.11.0", "1.0"), (EARLIER_BASE, "2.10.0", "2.0")])
def test_releases_of_the_day_for_the_bases_cuda_are_taken_without_exemption(
    moving: Any, base: str, torch: str, tools: str
) -> None:
    moving.run(*LOCK, "--pin", AFTER, "--base", base, "--name", "x")
    assert (versions(moving, "x", base)["torch"], versions(moving, "x", base)["tools"]) == (torch, tools)
    assert lock_of(moving, "x", base).exempt == {}


def test_stack_is_held_to_the_bases_cuda_where_uv_would_rather_take_another(
    moving: Any, wheel: Callable[..., None]
) -> None:
    """As of lib 1.5, torch 2.11 is there; uv takes the newest tools and then torch 2.10, which goes with them."""
    wheel("lib", "1.5", "2025-09-05T00:00:00Z", requires=("torchvision",))
    command = (*LOCK, "--pin", "lib=1.5", "--base", GPU_BASE, "--name", "x")
    moving.run(*command)
    assert (versions(moving, "x")["torch"], versions(moving, "x")["tools"]) == ("2.11.0", "1.0")
    assert lock_of(moving, "x", GPU_BASE).exempt == {}
    stack_of(moving, releases_for_cuda={})
    # Without the stack's ranges uv goes back to the old one.
    assert "[cuda-mixed:" in error(moving.run(*command, "--upgrade", status=5))["why"]


def test_pin_wins_over_the_releases_for_the_bases_cuda(moving: Any) -> None:
    pins = ("--pin", AFTER, "--pin", "torch=2.10.0", "--base", GPU_BASE, "--name", "x")
    assert "[cuda-mixed:" in error(moving.run(*LOCK, *pins, status=5))["why"]
    moving.run(*LOCK, *pins, "--allow", "cuda-mixed")
    assert versions(moving, "x")["torch"] == "2.10.0"
    assert lock_of(moving, "x", GPU_BASE).components["torch"].because == "pinned by the user"
