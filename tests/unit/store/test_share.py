"""A directory store in which somebody put what is no file: nothing is waited for, and it is refused."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.errors import error_of
from helpers.store_entries import KEY, Place, entry, fetched, push

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore
from envbuild.store.remote import Pushed


@pytest.fixture
def place(tmp_path) -> Place:
    (tmp_path / "share").mkdir()
    return Place(f"file://{tmp_path}/share")


def absurd(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


MADE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "larger than": absurd,
}


@pytest.mark.parametrize("expected", list(MADE))
def test_a_document_that_is_no_file_is_refused(place, tmp_path, expected):
    remote = place.open()
    push(remote, entry(tmp_path / "made", big=b"big"))
    (path,) = (tmp_path / "share/entries/things").iterdir()
    path.unlink()
    MADE[expected](path)
    with pytest.raises(CheckRefusedError) as caught:
        remote.find("things", KEY)
    assert expected in caught.value.why
    assert str(tmp_path / "share") in caught.value.what
    assert remote.keys("things") == ([] if expected == "a folder" else [KEY])
    assert isinstance(remote.documents("things", [KEY])[KEY], CheckRefusedError)


@pytest.mark.parametrize("expected", [name for name in MADE if name != "larger than"])
def test_blob_that_is_not_a_file_is_refused_and_put_back(place, tmp_path, expected):
    remote = place.open()
    made = entry(tmp_path / "made", big=b"big")
    push(remote, made)
    blob = tmp_path / "share/blobs/sha256" / sha256_bytes(b"big").removeprefix("sha256:")
    blob.unlink()
    MADE[expected](blob)
    error = error_of(CheckRefusedError, fetched, remote, tmp_path / "got")
    assert ("is refused" in error.what, expected in error.why) == (True, True)
    if expected != "a folder":
        assert push(remote, made, replace=lambda _: True) is Pushed.REPLACED
        assert stat.S_ISREG(blob.lstat().st_mode)


@pytest.mark.parametrize("name", ["file", ".sealed.json"])
@pytest.mark.parametrize("expected", ["a pipe", "a device"])
def test_a_local_entry_with_what_is_no_file_is_made_anew(tmp_path, name, expected):
    store = LocalStore(tmp_path / "store", SilentReporter())
    made = store.get_or_build("things", KEY, lambda folder: (folder / "file").touch()).path / name
    made.unlink()
    MADE[expected](made)
    assert store.find("things", KEY) is None
    assert store.get_or_build("things", KEY, lambda folder: (folder / "file").touch()).built
