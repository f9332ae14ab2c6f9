"""The world in which `certify` is called: all of it but the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.certify_world import World, place_image
from helpers.locks import inputs_of, make_lock

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.certify import calibrate, certify
from envbuild.lock.lockfile import read_lock


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    project = tmp_path / "project"
    selection = select(
        Catalog.open(project), "mcore", "cpu", "debian12", HostDistribution(distribution="debian", release="12")
    )
    make_lock(project / "lockfiles" / "mcore" / "debian12", inputs=inputs_of(selection))
    lock = read_lock(project / "lockfiles" / "mcore" / "debian12")
    made = World(project, selection, lock, place_image(project / "out", lock))
    for module in (certify, calibrate):
        monkeypatch.setattr(module, "open_executor", made.open_executor)
    return made
