"""The world in which `certify` is called: all of it but the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.certify_world import World
from helpers.locks import lock_mcore, mcore_of
from helpers.placed_images import place_image

from envbuild.certify import certify
from envbuild.cli.main import run


def make_world(project: Path, patch: pytest.MonkeyPatch) -> World:
    lock = lock_mcore(project)
    made = World(project, mcore_of(project), lock, place_image(project / "out", lock))
    patch.setattr(certify, "open_executor", made.open_executor)
    # It installs the lock.
    patch.setattr(certify, "locked_records", lambda _lock, _context: {})
    return made


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path / "project", monkeypatch)


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One for all tests of a module that leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        yield make_world(tmp_path_factory.mktemp("shared") / "project", patch)


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`envbuild certify` in the project of the world, with more words."""
    monkeypatch.chdir(world.project)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(world.project / "cache"))
    return lambda *words: run(
        ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", *map(str, words)]
    )


def refuse(word: str) -> NoReturn:
    raise AssertionError(word)


@pytest.fixture
def answer(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code of the command with ``--json`` and its object, or its error; JSON has no NaN."""

    def answer(*words: object) -> tuple[int, dict[str, Any]]:
        status = command("--json", *words)
        document = json.loads(capsys.readouterr().out, parse_constant=refuse)
        return status, document.get("error", document)

    return answer
