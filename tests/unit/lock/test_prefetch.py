"""What is begun before it is known to be needed: guesses that decide nothing, files of releases that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.locks import lock_context, resolved_package

from envbuild.core.background import run_in_background
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import NetworkError, ResolutionError
from envbuild.lock.components.models import CompileMetadata, GitSources
from envbuild.lock.resolve import resolve as resolve_module
from envbuild.lock.resolve.declarations import kept_files
from envbuild.lock.resolve.resolve import Guess
from envbuild.lock.uv.named_index import OwnIndexes
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv.torch_builds import TorchSource
from envbuild.lock.uv_lock import UvLock

HASHES = {name: sha256_bytes(name.encode()) for name in ("wheel", "sdist", "other")}
UV_LOCK = f"""
[[package]]
name = "my-lib"
version = "1.0"
source = {{ registry = "https://x/simple" }}
sdist = {{ url = "https://x/my_lib-1.0.tar.gz", hash = "{HASHES["sdist"]}" }}
wheels = [{{ url = "https://x/my_lib-1.0-py3-none-any.whl", hash = "{HASHES["wheel"]}" }}]
"""


def locked(folder: Path, text: str | None, *stated: str):
    """A lock that states these hashes, with this uv.lock next to it."""
    if text is not None:
        (folder / "uv.lock").write_text(text)
    (folder / "main.txt").write_text("my-lib==1.0 \\\n" + "".join(f"    --hash={HASHES[name]}\n" for name in stated))
    return SimpleNamespace(
        path=folder, lock=SimpleNamespace(phases={"main": 1}), file=lambda phase: folder / "main.txt"
    )


def test_files_of_a_kept_release_come_from_the_uv_lock_of_its_lock(tmp_path):
    actual = kept_files(["my-lib"], {"my-lib": "1.0"}, locked(tmp_path, UV_LOCK, "wheel", "sdist"))
    assert actual is not None
    assert actual["my-lib"].sdist.url == "https://x/my_lib-1.0.tar.gz"


@pytest.mark.parametrize(
    ("text", "keep", "stated"),
    [
        (None, "1.0", ["wheel", "sdist"]),
        (UV_LOCK, "1.1", ["wheel", "sdist"]),
        (UV_LOCK, None, ["wheel", "sdist"]),
        (UV_LOCK, "1.0", ["wheel", "other"]),
        (UV_LOCK, "1.0", ["sdist"]),
        (UV_LOCK.replace("url", "path"), "1.0", ["wheel", "sdist"]),
        (UV_LOCK.replace("hash", "size"), "1.0", ["wheel", "sdist"]),
        (UV_LOCK.replace("my-lib", "lib"), "1.0", ["wheel", "sdist"]),
        ("[[package]]\nname = 1\n", "1.0", ["wheel", "sdist"]),
        ("package = 1", "1.0", []),
        ("x = 1", "1.0", []),
        ("[", "1.0", []),
    ],
)
def test_what_the_lock_itself_does_not_state_is_not_taken(tmp_path, text, keep, stated):
    kept = {"my-lib": keep} if keep else {}
    assert kept_files(["my-lib"], kept, locked(tmp_path, text, *stated)) is None


def test_without_a_lock_nothing_is_kept():
    assert kept_files(["my-lib"], {"my-lib": "1.0"}, None) is None


RESOLUTION = Resolution(UvLock(package=()))


@pytest.fixture
def resolving(tmp_path, monkeypatch):
    """Resolves a plan whose project is always the text ``true``; returns what was resolved here, and what was found."""
    asked = []

    def resolve(folder, *arguments, **options):
        asked.append((folder / "pyproject.toml").read_text())
        return RESOLUTION

    monkeypatch.setattr(resolve_module, "resolve", resolve)

    def run(begun, metadata=()):
        project = SimpleNamespace(metadata=metadata, every={}, chosen={}, git_sources=GitSources(), pinned_directly=set)
        inputs = SimpleNamespace(request=SimpleNamespace(pins={}))
        plan = SimpleNamespace(
            own=OwnIndexes(),
            torch=TorchSource("find-links", "x"),
            keep={},
            preferred={},
            project=project,
            inputs=inputs,
            what="resolve",
            project_text=lambda pins: "true",
            kept_text="true",
        )
        plan.effective = SimpleNamespace(stack=SimpleNamespace(every_component=dict))
        first = resolve_module.resolve_first(plan, begun, lock_context(tmp_path))
        return asked, resolve_module.pinned(first, lock_context(tmp_path)).resolution

    return run


def begun_with(folder: Path, text: str, action=lambda: RESOLUTION) -> Guess:
    own = folder / "begun"
    own.mkdir(parents=True)
    (own / "uv.lock").write_text("the one begun")
    return Guess(text=text, folder=own, answer=run_in_background(action))


def test_a_right_guess_is_the_answer(resolving, tmp_path):
    asked, actual = resolving(begun_with(tmp_path, "true"))
    assert (asked, actual) == ([], RESOLUTION)
    assert (tmp_path / "uv.lock").read_text() == "the one begun"
    assert (tmp_path / "pyproject.toml").read_text() == "true"


def test_a_wrong_guess_is_resolved_anew(resolving, tmp_path):
    begun = begun_with(tmp_path, "guessed")
    asked, actual = resolving(begun)
    assert (asked, actual) == (["true"], RESOLUTION)
    assert not (tmp_path / "uv.lock").exists()


def test_what_fails_is_the_failure_of_a_right_guess_alone(resolving, tmp_path):
    def unreachable():
        raise NetworkError("no index", why="w", fix="f")

    with pytest.raises(NetworkError, match="no index"):
        resolving(begun_with(tmp_path / "right", "true", unreachable))
    assert resolving(begun_with(tmp_path / "wrong", "guessed", unreachable))[0] == ["true"]


def test_sdist_other_than_the_one_that_was_read_is_refused(resolving, tmp_path):
    read = CompileMetadata(
        name="kernels", version="1.0", sdist_digest="sha256:read", requires_dist=(), provides_extra=(),
        build_requires=(), rewritten=(),
    )  # fmt: skip
    package = resolved_package({"name": "kernels", "version": "1.0", "sdist": {"hash": "sha256:other"}})
    actual = replace(RESOLUTION, uv_lock=UvLock(package=(package,)))
    with pytest.raises(ResolutionError, match=r"another sdist of kernels 1\.0") as caught:
        resolving(begun_with(tmp_path, "true", lambda: actual), metadata=(read,))
    assert "now the index states sha256:other" in caught.value.why
