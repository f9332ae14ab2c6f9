"""A store for temporary things: of this account alone, and where programs and devices work."""

import os
import stat

import pytest

from envbuild.core.errors import MachineError
from envbuild.store import local
from envbuild.store.local import place_with_devices, temporary_store


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(local.tempfile, "gettempdir", lambda: str(tmp_path))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_folder_that_others_may_enter_is_closed(tmp_path):
    folder = tmp_path / f"envbuild-{os.geteuid()}"
    folder.mkdir(0o755)
    assert temporary_store().root == folder
    assert mode(folder) == 0o700


def test_folder_of_another_account_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    (tmp_path / "envbuild-4000000").mkdir()
    with pytest.raises(MachineError, match="belongs to another account"):
        temporary_store()


def test_folder_behind_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"envbuild-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match="belongs to another account"):
        temporary_store()


@pytest.mark.parametrize("forbidden", ["ST_NODEV", "ST_NOEXEC", "ST_RDONLY"])
def test_a_disk_without_devices_or_programs_is_passed_over(tmp_path, monkeypatch, forbidden):
    large, real = tmp_path / "large", os.statvfs
    large.mkdir()
    monkeypatch.setattr(local, "LARGE", large)
    assert place_with_devices() == tmp_path

    def mounted(path):
        values = list(real(path))
        values[8] |= getattr(os, forbidden) if path == tmp_path else 0
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", mounted)
    assert place_with_devices() == large
    monkeypatch.setattr(local, "LARGE", tmp_path)
    assert place_with_devices() is None
