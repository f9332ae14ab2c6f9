"""Files of a pull in the store: hashed once, changed, and what a killed pull left."""

import os
import shutil

import pytest

from envbuild.core import digests
from envbuild.core.errors import (
    CheckRefusedError,
)
from envbuild.core.files import clone_or_copy
from envbuild.publish import kept_files
from envbuild.publish.pull import SQSH_KIND, pull
from envbuild.publish.sqsh_stores import SqshStore
from envbuild.store import entry_index

PARTIAL_KIND = f"{SQSH_KIND}-{kept_files.PARTIAL}"


@pytest.fixture
def hashed(monkeypatch):
    """The .sqsh files of the store that were hashed."""
    paths = []
    sha256_file = digests.sha256_file

    def counted(path):
        if SQSH_KIND in str(path) and path.suffix != ".jsonl":
            paths.append(path)
        return sha256_file(path)

    for module in (kept_files, entry_index):
        monkeypatch.setattr(module, "sha256_file", counted)
    return paths


def test_file_is_hashed_once(there, hashed):
    there.publish()
    for _ in range(3):
        pull(there.request(), there.context)
    assert len(hashed) == 1


@pytest.mark.parametrize("touch", ["chmod", "link", "mtime", "copy", "store without notes"])
def test_what_only_moves_its_time_of_change_costs_one_reading(there, hashed, tmp_path, touch):
    there.publish()
    path = pull(there.request(), there.context).path
    before = path.stat()
    match touch:
        case "chmod":
            path.chmod(0o400)
        case "link":
            (path.parent / "backup").hardlink_to(path)
        case "mtime":
            os.utime(path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "store without notes":  # of an earlier version
            shutil.rmtree(there.home / f"cache/{SQSH_KIND}-{kept_files.CHECKED}")
        case _:
            clone_or_copy(path, tmp_path / "copy")
    hashed.clear()
    for _ in range(3):
        assert not pull(there.request(), there.context).downloaded
    assert len(hashed) == (0 if touch == "copy" else 1)


def test_changed_file_in_the_store_is_fetched_anew(there):
    there.publish()
    path = pull(there.request(), there.context).path
    path.write_bytes(b"x" * path.stat().st_size)
    fetched = pull(there.request(), there.context)
    assert fetched.downloaded
    assert fetched.path.read_bytes() == there.image.read_bytes()


@pytest.mark.parametrize("times", [1, 2])
def test_file_that_was_changed_with_its_time_put_back_is_fetched_anew(there, times):
    there.publish()
    for _ in range(times):
        path = pull(there.request(), there.context).path
        before = path.stat()
        with path.open("r+b") as stream:
            stream.write(b"another")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        fetched = pull(there.request(), there.context)
        assert fetched.downloaded
        assert fetched.path.read_bytes() == there.image.read_bytes()


def test_changed_file_of_a_store_that_cannot_be_changed_is_refused(there, monkeypatch):
    there.publish()
    path = pull(there.request(), there.context).path
    before = path.stat()
    path.write_bytes(b"?" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr(kept_files, "mark_changed", lambda _: None)
    with pytest.raises(CheckRefusedError, match="is refused") as refused:
        pull(there.request(), there.context)
    assert "was changed" in refused.value.why


def test_what_a_killed_pull_had_is_not_fetched_again(there, monkeypatch):
    publication = there.publish()
    part = there.context.store.path_of(PARTIAL_KIND, publication.sqsh.digest)
    part.parent.mkdir(parents=True)
    part.write_bytes(there.image.read_bytes()[:100_000])
    starts = []
    download = SqshStore.download

    def counted(self, sqsh, to, start=0):
        starts.append(start)
        return download(self, sqsh, to, start)

    monkeypatch.setattr(SqshStore, "download", counted)
    assert pull(there.request(), there.context).path.read_bytes() == there.image.read_bytes()
    assert starts == [100_000]
    assert not part.exists()


def test_partial_file_of_other_bytes_is_fetched_from_the_start(there):
    publication = there.publish()
    part = there.context.store.path_of(PARTIAL_KIND, publication.sqsh.digest)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"?" * 1000)
    assert pull(there.request(), there.context).path.read_bytes() == there.image.read_bytes()


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda data: data[:-1], "bytes instead of"), (lambda data: data[:-1] + b"?", "digest is another")],
)
def test_damaged_sqsh_is_refused_and_not_kept(there, change, why):
    there.publish()
    file = there.served("sqsh")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckRefusedError, match="is refused") as refused:
        pull(there.request(), there.context)
    assert why in refused.value.why
    assert str(there.home / "share") in refused.value.why
    cache = there.home / "cache"
    assert not list((cache / SQSH_KIND).glob("*/*"))
    assert not list((cache / PARTIAL_KIND).iterdir())


def test_sqsh_that_is_gone_is_refused(there):
    there.publish()
    there.served("sqsh").unlink()
    with pytest.raises(CheckRefusedError, match="is refused") as refused:
        pull(there.request(), there.context)
    assert "it is gone" in refused.value.why
