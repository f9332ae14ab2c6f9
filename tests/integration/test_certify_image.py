"""`certify` in a real image that has no torch: a stand-in for the smoke runner says what it saw inside."""

from __future__ import annotations

import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.mini import NAME

from envbuild.catalog.catalog import Catalog, Machine, select
from envbuild.certify import certifying
from envbuild.certify.certifying import certify
from envbuild.core.digests import sha256_file
from envbuild.core.progress import SilentReporter
from envbuild.image.outputs import find_image
from envbuild.launch.local import run_in_image
from envbuild.lock.locking import find_lock
from envbuild.store.local import LocalStore

STAND_IN = Path(__file__).parents[1] / "helpers" / "stand_in.py"


def stand_in(folder: Path, port: int) -> tuple[Path, str]:
    """The stand-in as a zipapp, and its digest."""
    file = folder / "smoke.pyz"
    with zipfile.ZipFile(file, "w") as archive:
        source = STAND_IN.read_text()
        assert "\nPORT = 0\n" in source
        archive.writestr("__main__.py", source.replace("\nPORT = 0\n", f"\nPORT = {port}\n"))
    return file, sha256_file(file)


def seen_inside(mini: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the certificate says of the environment, with somebody outside who listens on loopback."""
    selection = select(Catalog.open(mini.project), NAME, "cpu", None, Machine.here())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(certifying, "smoke_file", lambda store: stand_in(tmp_path, listening.getsockname()[1]))
        done = certify(
            selection,
            lock=find_lock(mini.project, selection),
            image=find_image(mini.project / "out", NAME, selection.base_name, "cpu"),
            matrix_name="certify-quick",
            only=(),
            out_dir=tmp_path / "out",
            store=LocalStore(mini.cache, SilentReporter()),
            reporter=SilentReporter(),
        )
    assert done.ran
    return done.statement.predicate.environment


def test_cases_have_loopback_and_nothing_else(
    mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen_inside(mini, tmp_path, monkeypatch) == {"interfaces": ["lo"], "reached": False}


def test_stand_in_would_reach_the_machine_outside_if_it_had_its_network(
    mini: Tool, mini_image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail."""

    def with_network(*arguments: Any, **options: Any) -> Any:
        return run_in_image(*arguments, **{**options, "network": True})

    monkeypatch.setattr(certifying, "run_in_image", with_network)
    assert seen_inside(mini, tmp_path, monkeypatch)["reached"] is True
