"""Files and trees appear whole or not at all, also when the process or the disk gives up."""

import errno
import os
import resource
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from helpers.processes import in_child, unprivileged

from envbuild.core import files
from envbuild.core.errors import MachineError
from envbuild.core.files import (
    clone_or_copy,
    link_or_copy,
    os_error,
    remove_tree,
    replace_tree,
    write_atomic,
)


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_write_atomic_that_is_killed_keeps_the_old_file_and_wrote_next_to_it(tmp_path, monkeypatch):
    """A file in another folder may be on another disk, from where no rename leads here."""
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "place" / "file"
    elsewhere.mkdir()
    write_atomic(path, "old")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(files.os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert in_child(lambda: write_atomic(path, "new")) == -signal.SIGKILL
    assert path.read_text() == "old"
    assert [name.startswith(".file.") for name in entries(path.parent)] == [True, False]
    assert entries(elsewhere) == []


def test_write_atomic_keeps_the_old_file_when_the_file_system_refuses(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(MachineError, match="cannot write") as caught:
            write_atomic(path, "x" * 8192)
        assert "File too large" in caught.value.why

    assert in_child(write_too_much) == 0
    assert path.read_text() == "old"
    assert entries(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "is full"),
        (errno.EACCES, "no permission"),
        (errno.EPERM, "no permission"),
        (errno.EROFS, "no permission"),
        (errno.EIO, "cannot write"),
    ],
)
def test_os_error_by_number(number, text):
    error = os_error(OSError(number, os.strerror(number), "/some/file"), Path("/elsewhere"))
    assert isinstance(error, MachineError)
    assert text in error.what
    assert error.fix


def test_os_error_names_what_was_tried():
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/file")
    assert os_error(refused, Path()).what == "no permission to write /some/file"
    assert "--out" in os_error(refused, Path()).fix.replace("--out-dir", "")
    for doing in ("read", "use"):
        error = os_error(refused, Path(), doing)
        assert error.what == f"no permission to {doing} /some/file"
        assert "--out" not in error.fix


def make_tree(folder: Path, text: str) -> Path:
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text(text)
    return folder


@pytest.mark.parametrize("existing", [True, False])
def test_replace_tree(tmp_path, existing):
    final = tmp_path / "place" / "final"
    if existing:
        make_tree(final, "old")
        (final / "only-in-old").write_text("")
    replace_tree(make_tree(tmp_path / "staged", "new"), final)
    assert (final / "below" / "file").read_text() == "new"
    assert entries(final) == ["below"]
    assert entries(final.parent) == ["final"]
    assert entries(tmp_path) == ["place"]


def test_replace_tree_brings_the_old_tree_back_when_the_new_one_cannot_come(tmp_path):
    final = make_tree(tmp_path / "place" / "final", "old")
    with pytest.raises(MachineError):
        replace_tree(tmp_path / "missing", final)
    assert (final / "below" / "file").read_text() == "old"
    assert entries(final.parent) == ["final"]


def test_replace_tree_killed_between_the_renames_loses_nothing(tmp_path, monkeypatch):
    final, staged = make_tree(tmp_path / "final", "old"), make_tree(tmp_path / "staged", "new")
    rename = Path.rename

    def rename_then_die(self, target):
        rename(self, target)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Path, "rename", rename_then_die)
    assert in_child(lambda: replace_tree(staged, final)) == -signal.SIGKILL
    assert [path.read_text() for path in tmp_path.glob(".final.old.*/final/below/file")] == ["old"]
    assert (staged / "below" / "file").read_text() == "new"


def test_link_or_copy_links_on_one_disk_and_replaces(tmp_path):
    (tmp_path / "source").write_text("new")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "copy").write_text("old")
    link_or_copy(tmp_path / "source", tmp_path / "place" / "copy")
    assert (tmp_path / "place" / "copy").samefile(tmp_path / "source")
    assert entries(tmp_path / "place") == ["copy"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_link_or_copy_copies_where_links_are_refused(tmp_path, monkeypatch, number):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "link", refuse)
    (tmp_path / "source").write_text("content")
    link_or_copy(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "content"
    assert not (tmp_path / "copy").samefile(tmp_path / "source")
    assert entries(tmp_path) == ["copy", "source"]


def test_clone_or_copy_makes_a_file_of_its_own(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "place" / "copy"
    source.write_text("content")
    source.chmod(0o640)
    os.utime(source, (1, 1))
    copy.parent.mkdir()
    copy.write_text("old")
    clone_or_copy(source, copy)
    assert (copy.read_text(), copy.stat().st_mode & 0o777, copy.stat().st_mtime) == ("content", 0o640, 1)
    copy.write_text("changed")
    assert source.read_text() == "content"
    assert entries(copy.parent) == ["copy"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, 0])
def test_clone_or_copy_shares_blocks_where_it_can(tmp_path, monkeypatch, number):
    def clone(copy, request, source) -> None:
        assert request == 0x40049409
        if number:
            raise OSError(number, os.strerror(number))
        os.write(copy.fileno(), os.read(source, 7))

    monkeypatch.setattr(files.fcntl, "ioctl", clone)
    copied = []
    monkeypatch.setattr(
        files.shutil, "copyfile", lambda one, other: copied.append(other) or other.write_text("content")
    )
    (tmp_path / "source").write_text("content")
    clone_or_copy(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "content"
    assert bool(copied) == bool(number)


def test_clone_or_copy_names_a_full_disk(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.fcntl, "ioctl", refuse)
    (tmp_path / "source").write_text("content")
    with pytest.raises(MachineError, match="full"):
        clone_or_copy(tmp_path / "source", tmp_path / "copy")
    assert entries(tmp_path) == ["source"]


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o555])
def test_remove_tree_opens_closed_folders(open_dir, mode):
    def make_and_remove() -> None:
        tree = make_tree(open_dir / "tree", "x")
        (tree / "below").chmod(mode)
        tree.chmod(mode)
        remove_tree(tree)
        assert not tree.exists()

    assert unprivileged(make_and_remove) == 0


def test_remove_tree_does_not_follow_links(tmp_path):
    outside = make_tree(tmp_path / "outside", "x")
    outside.chmod(0o555)
    tree = make_tree(tmp_path / "tree", "x")
    (tree / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    remove_tree(tree)
    remove_tree(tmp_path / "link")
    assert entries(tmp_path) == ["outside"]
    assert stat.S_IMODE(outside.stat().st_mode) == 0o555


def test_a_tree_that_is_still_written_to_is_removed(tmp_path, monkeypatch):
    """Programs that were ended a moment ago, and threads that ran them, may still make files."""
    tree, real, late = tmp_path / "tree", shutil.rmtree, [1, 2]
    (tree / "folder").mkdir(parents=True)

    def rmtree(path):
        if late:
            (tree / "folder" / f"late{late.pop()}").touch()
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        real(path)

    monkeypatch.setattr(files.shutil, "rmtree", rmtree)
    monkeypatch.setattr(files, "REMOVAL_PAUSE", 0)
    remove_tree(tree)
    assert not tree.exists()
    tree.mkdir()
    late[:] = range(files.REMOVALS)
    (tree / "folder").mkdir()
    with pytest.raises(OSError, match="not empty"):
        remove_tree(tree)
