"""What is fed to mksquashfs: the layers merged the way enroot lays them out."""

import io
import tarfile

import pytest
from helpers.layer_tars import file, folder, hard_link, layer, symlink

from envbuild.image.squashfs.tar_stream import DuplicateMemberError, write_stream
from envbuild.rootfs.overlay import superseded_in

EPOCH = 100


def merged(layers, extra=None, workdir="", superseded=()):
    stream = io.BytesIO()
    write_stream(stream, layers, extra or {}, workdir, EPOCH, superseded)
    stream.seek(0)
    with tarfile.open(fileobj=stream, errors="surrogateescape", encoding="utf-8") as tar:
        members = tar.getmembers()
        names = [member.name for member in members]
        assert len(names) == len(set(names)), "a path twice"
        return {member.name: (member, tar.extractfile(member).read() if member.isreg() else None) for member in members}


def test_stream_has_hard_links_behind_their_file(tmp_path):
    """mksquashfs 4.5 crashes on a hard link that comes before its file."""
    low = layer(tmp_path, file("z", b"1"), hard_link("a", "z"), file("old", b"2"), hard_link("y", "old"))
    found = merged([low, layer(tmp_path, hard_link("b", "z"), file("old", b"3"))])
    assert {name: member.linkname for name, (member, _) in found.items() if member.islnk()} == {"a": "z", "b": "z"}
    assert list(found).index("z") < min(list(found).index("a"), list(found).index("b"))
    assert found["y"][1] == b"2"


def test_stream_keeps_a_working_directory_that_is_a_link(tmp_path):
    assert merged([layer(tmp_path, folder("srv"), symlink("app", "srv"))], workdir="/app/x")["app"][0].issym()


def test_stream_of_a_layer_with_a_file_twice(tmp_path):
    one = layer(tmp_path, file("a", b"1"), file("a", b"2"))
    with pytest.raises(DuplicateMemberError):
        merged([one])
    assert merged([one], superseded=superseded_in([one]))["a"][1] == b"2"
