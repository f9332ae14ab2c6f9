"""Where commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

SETTINGS = ("ENVBUILD_CONFIG", "ENVBUILD_SIGNING_KEY", "ENVBUILD_SIGNING_PASSWORD", "ENVBUILD_TRUST")
PLACES = ("XDG_CONFIG_HOME", "UV_FIND_LINKS", "PIP_FIND_LINKS")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of a user with a cache of its own and no settings, which is their home too."""
    path = tmp_path / "project"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENVBUILD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in (*SETTINGS, *PLACES):
        monkeypatch.delenv(name, raising=False)
    return path
