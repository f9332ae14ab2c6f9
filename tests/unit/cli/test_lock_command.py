"""Usage and definitions that `envbuild lock` and `sync` refuse before anything is resolved: no uv is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from conftest import Tool
from helpers.lock_runs import error
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack, write_target

from envbuild.cli.lock import command, pin_texts
from envbuild.image import verification
from envbuild.lock.uv import program

LOCK = ("lock", "--stack", "s", "--json")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Stack `s` of `lib`, which leads it, and `dep`; nothing may run uv."""

    def refuse(*arguments: object, **more: object) -> None:
        pytest.fail(f"uv was started: {arguments}")

    monkeypatch.setattr(program, "run", refuse)
    tool = Tool(tmp_path / "project", tmp_path / "cache")
    write_base(tool.project)
    write_base(tool.project, GPU_BASE, cuda="13.0", glibc="2.35")
    write_target(tool.project, "gpu", sm=("90",))
    write_stack(tool.project, "s", {"lib": {}, "dep": {"version": ">=1"}}, anchor="lib")
    return tool


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (("--allow", "nonsense"), 2, "no check has that code"),
        (("--allow", "nonsense:12345678"), 2, "no check has that code"),
        (("--allow", "glibc:1234567"), 2, "has no ID of a finding"),
        (("--pin", "lib=1.0", "--pin", "LIB=1.0", "--name", "x"), 2, "pinned twice"),
        (("--pin", "bogus=1"), 2, "no component 'bogus' to pin"),
        (("--pin", "bogus=1", "--name", "x"), 2, "lib, dep"),
        (("--pin", "dep=1.0"), 2, "pins need a name"),
        (("--pin", "dep=main", "--name", "x"), 3, "dep has no repository"),
        (("--check", "--pin", "lib=1.0"), 2, "or envbuild lock --stack s --pin lib=1.0 --json"),
        (("--all", "--name", "x"), 2, "--all does not go with --name, --stack"),
        (("--all", "--exact"), 2, "Take one of them: envbuild lock --all --json, or envbuild lock --stack s --exact"),
        (("--no-verify", "--check"), 2, "--check does not go with --no-verify"),
        (("--out", "x", "--name", "x"), 2, "--out and --name exclude each other"),
        (("--as-of", "2999-01-01", "--no-verify"), 2, "is not over yet"),
        (("--as-of", "2025-2-1", "--no-verify"), 2, "is neither a date nor a commit"),
        (("--as-of", "soon", "--no-verify"), 2, "--as-of soon"),
        (("--out", "."), 2, "not a folder of a lock"),
        (("--out", "thesis"), 2, "a.txt, sub"),
        (("--diff",), 3, f"envbuild lock --stack s --base {BASE}"),
        (("--diff", "--out", "nowhere"), 3, "envbuild lock --stack STACK --base BASE --out nowhere"),
    ],
)
def test_wrong_options_are_refused(project: Tool, words: tuple[str, ...], status: int, expected: str) -> None:
    (project.project / "thesis/sub").mkdir(parents=True)
    (project.project / "thesis/a.txt").write_text("work")
    refused = error(project.run(*LOCK, *words, status=status))
    assert expected in f"{refused['what']}\n{refused['why']}\n{refused['fix']}"
    assert "--target" not in refused["fix"]
    assert (project.project / "thesis/a.txt").read_text() == "work"
    assert not (project.project / "lockfiles").exists()


def test_the_release_needs_an_anchor(project: Tool) -> None:
    write_stack(project.project, "s", {"lib": {}})
    assert "has no anchor" in error(project.run(*LOCK, "--as-of", "release", status=2))["what"]


def test_a_pin_of_what_is_on_bases_with_cuda_alone(project: Tool) -> None:
    builds = [{"target": "cpu", "bases": [BASE]}, {"target": "gpu", "bases": [GPU_BASE]}]
    write_stack(project.project, "s", {"lib": {}, "kernels": {"device": "cuda"}}, builds=builds)
    refused = error(project.run(*LOCK, "--base", BASE, "--pin", "kernels=1.0", status=2))
    assert "stack s has kernels on bases with CUDA only" in refused["what"]


@pytest.mark.parametrize("changes", [{"against": []}, {"version": ""}])
def test_an_override_of_what_one_package_declares_needs_it_and_a_version(project: Tool, changes: Any) -> None:
    override = {"version": ">=2", "reason": "r", "against": ["lib"], "only_against": True, **changes}
    write_stack(project.project, "s", {"lib": {}}, overrides={"dep": override})
    assert "only_against = true needs" in error(project.run(*LOCK, status=3))["why"]


def test_a_machine_that_cannot_verify_is_refused_before_anything_is_resolved(project: Tool) -> None:
    write_base(project.project, glibc="2.99")
    # Without mmdebstrap and bubblewrap there is no root file system either.
    project.env["PATH"] = str(project.project)
    refused = error(project.run(*LOCK, "--verify", status=11))
    assert f"base {BASE}: " in refused["why"]
    assert "The base has glibc 2.99" in refused["why"]
    assert "--no-verify" in refused["fix"]


@pytest.mark.parametrize(
    ("word", "ref"),
    [
        ("lib=2.0", "2.0"),
        # As in a requirement.
        ("lib==2.0", "==2.0"),
        # As messages write a pin.
        ("lib===2.*", "==2.*"),
        ("lib====2.0", "===2.0"),
        ("lib=>=2,<3", ">=2,<3"),
    ],
)
def test_words_of_pins(word: str, ref: str) -> None:
    assert pin_texts(click.Context(command), command.params[0], (word,)) == {"lib": ref}


def test_where_nothing_can_be_verified_the_command_that_locks_is_given(
    project: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "verification_places", lambda *_: ())
    refused = error(project.run(*LOCK, "--pin", "dep=2", "--name", "x", "--verify", status=11))
    assert refused["fix"].endswith("\nenvbuild lock --stack s --pin dep=2 --name x --json --no-verify")
