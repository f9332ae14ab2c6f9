"""Objects in a directory that machines share: conditional writes, and files that are copied on where it ended."""

import os
import stat
import threading

import pytest

from envbuild.core.errors import ConfigurationError, MachineError, NetworkError
from envbuild.store import share as share_module
from envbuild.store.address import parse_address
from envbuild.store.connect import open_object_store
from envbuild.store.registry_errors import Wording
from envbuild.store.share import Share

MANY = 1 << 20


@pytest.fixture
def share(tmp_path) -> Share:
    (tmp_path / "share").mkdir()
    return Share(tmp_path / "share", Wording(noun=".sqsh store"))


def test_replace_only_of_what_was_read(share):
    share.create("tag", b"one")
    read = share.read("tag", MANY)
    assert share.replace("tag", b"two", read)
    assert not share.replace("tag", b"three", read)
    assert share.read("tag", MANY).content == b"two"
    assert os.listdir(share._root / "incoming") == ["lock"]


def test_replace_loses_no_write_of_many(share):
    share.create("count", b"")

    def append(word: bytes) -> None:
        while True:
            read = share.read("count", MANY)
            if share.replace("count", read.content + word, read):
                return

    threads = [threading.Thread(target=append, args=(f"{number};".encode(),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = share.read("count", MANY).content.decode().split(";")
    assert sorted(found) == sorted(["", *map(str, range(16))])


def test_upload_goes_on_where_a_killed_one_ended(share, tmp_path, monkeypatch):
    monkeypatch.setattr(share_module, "CHUNK_BYTES", 1000)
    content = os.urandom(10_500)
    (tmp_path / "file").write_bytes(content)
    part = share._root / "incoming/x.sqsh.part"
    part.parent.mkdir()
    # Whole chunks, then one that was half written when the machine died.
    part.write_bytes(content[:4000] + bytes(777))
    there = part.stat().st_ino
    written = []
    continued = share_module._continue

    def counted(source, out):
        write = out.write

        class Counting:
            def __getattr__(self, name):
                return getattr(out, name)

            def write(self, data):
                written.append(len(data))
                return write(data)

        continued(source, Counting())

    monkeypatch.setattr(share_module, "_continue", counted)
    share.upload(tmp_path / "file", "sqsh/x.sqsh", len(content))
    assert (share._root / "sqsh/x.sqsh").read_bytes() == content
    assert (share._root / "sqsh/x.sqsh").stat().st_ino == there
    assert sum(written) == len(content) - 4000
    assert not part.exists()


@pytest.mark.parametrize(("umask", "locks", "objects"), [(0o022, 0o600, 0o644), (0o002, 0o660, 0o664)])
def test_who_may_only_read_cannot_lock(share, tmp_path, monkeypatch, umask, locks, objects):
    (tmp_path / "file").write_bytes(b"content")
    modes = []
    continued = share_module._continue

    def seen(source, there):
        modes.append(stat.S_IMODE(os.fstat(there.fileno()).st_mode))
        continued(source, there)

    monkeypatch.setattr(share_module, "_continue", seen)
    before = os.umask(umask)
    try:
        share.upload(tmp_path / "file", "x", 7)
        share.remove("y")
    finally:
        os.umask(before)
    assert modes == [locks]
    assert stat.S_IMODE((share._root / "incoming/lock").stat().st_mode) == locks
    # What is there in the end is for everybody.
    assert stat.S_IMODE((share._root / "x").stat().st_mode) == objects


def test_download_goes_on_and_reads_no_more_than_one_byte_too_many(share, tmp_path):
    share.create("x", b"0123456789")
    (tmp_path / "to").write_bytes(b"012")
    assert share.download("x", 10, tmp_path / "to", 3)
    assert (tmp_path / "to").read_bytes() == b"0123456789"
    assert share.download("x", 5, tmp_path / "short")
    assert (tmp_path / "short").read_bytes() == b"012345"
    assert not share.download("y", 5, tmp_path / "none")


def test_large_files_are_striped_where_lfs_is(share, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    lfs = tmp_path / "bin/lfs"
    lfs.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n: > "$6"\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(share_module, "LEAST_STRIPED_BYTES", 1000)
    (tmp_path / "small").write_bytes(bytes(999))
    (tmp_path / "large").write_bytes(bytes(1000))
    share.upload(tmp_path / "small", "sqsh/small", 999)
    assert not (tmp_path / "asked").exists()
    share.upload(tmp_path / "large", "sqsh/large", 1000)
    part = share._root / "incoming/large.part"
    assert (tmp_path / "asked").read_text() == f"setstripe -c 32 -S 4M {part}\n"
    lfs.write_text("#!/bin/sh\nexit 1\n")
    share.upload(tmp_path / "large", "sqsh/other", 1000)
    assert (share._root / "sqsh/other").stat().st_size == 1000


def test_without_file_locks_nothing_is_replaced(share, monkeypatch):
    share.create("tag", b"one")
    read = share.read("tag", MANY)

    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(share_module.fcntl, "flock", refuse)
    with pytest.raises(MachineError, match="cannot be locked") as refused:
        share.replace("tag", b"two", read)
    assert "-o flock" in refused.value.fix
    assert share.read("tag", MANY).content == b"one"


def test_directory_that_is_not_there_is_no_empty_store(tmp_path):
    with pytest.raises(NetworkError, match="cannot be reached") as refused:
        Share(tmp_path / "none", Wording(noun=".sqsh store")).read("x", 1)
    assert "ENVBUILD_STORE" not in refused.value.fix


def test_a_registry_is_no_object_store():
    with pytest.raises(ConfigurationError, match="oci://host/repo"):
        open_object_store(parse_address("oci://host/repo"), wording=Wording(noun=".sqsh store"))
