"""What is fed to mksquashfs: the layers merged the way enroot lays them out."""

import io
import tarfile

import pytest
from helpers.layer_tars import device, file, folder, hard_link, layer, symlink

from envbuild.image.squashfs.tar_stream import DuplicateMemberError, write_stream
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer_writer import LayerWriter
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


def test_stream_gives_everything_to_root(tmp_path):
    found = merged([layer(tmp_path, file("x", b"1", uid=7, gid=8), folder("d", uid=7))])
    assert {(member.uid, member.gid) for member, _ in found.values()} == {(0, 0)}


def test_stream_replaces_a_link_by_a_file_of_enroots(tmp_path):
    found = merged([layer(tmp_path, symlink("etc/rc", "/elsewhere"))], {"etc/rc": b"script"})
    assert found["etc/rc"][0].isreg()
    assert found["etc/rc"][1] == b"script"


def test_stream_drops_what_is_in_dev_and_keeps_dev(tmp_path):
    one = layer(tmp_path, folder("dev"), device("dev/null"), file("dev/core", b"x"), file("devel", mode=0))
    assert set(merged([one])) == {"dev", "devel"}


def test_stream_opens_modes_for_the_owner(tmp_path):
    one = layer(tmp_path, folder("d", 0o500), file("d/f", mode=0), file("d/s", mode=0o4711))
    assert {name: member.mode for name, (member, _) in merged([one]).items()} == {
        "d": 0o700,
        "d/f": 0o400,
        "d/s": 0o4711,
    }


def test_stream_has_hard_links_behind_their_file(tmp_path):
    """mksquashfs 4.5 crashes on a hard link that comes before its file."""
    low = layer(tmp_path, file("z", b"1"), hard_link("a", "z"), file("old", b"2"), hard_link("y", "old"))
    found = merged([low, layer(tmp_path, hard_link("b", "z"), file("old", b"3"))])
    assert {name: member.linkname for name, (member, _) in found.items() if member.islnk()} == {"a": "z", "b": "z"}
    assert list(found).index("z") < min(list(found).index("a"), list(found).index("b"))
    assert found["y"][1] == b"2"


def test_stream_makes_the_working_directory_with_its_parents(tmp_path):
    found = merged([layer(tmp_path, folder("srv", 0o700))], workdir="/srv/a//b/")
    assert found["srv"][0].mode == 0o700
    assert found["srv/a"][0].isdir()
    assert found["srv/a/b"][0].mtime == EPOCH


def test_stream_keeps_a_working_directory_that_is_a_link(tmp_path):
    assert merged([layer(tmp_path, folder("srv"), symlink("app", "srv"))], workdir="/app/x")["app"][0].issym()


def test_stream_keeps_times_of_layers(tmp_path):
    with LayerWriter(tmp_path / "l.tar.gz", 33) as writer:
        writer.add_bytes("x", b"")
    assert merged([LayerBlob(file=tmp_path / "l.tar.gz")])["x"][0].mtime == 33


def test_stream_of_a_layer_with_a_file_twice(tmp_path):
    one = layer(tmp_path, file("a", b"1"), file("a", b"2"))
    with pytest.raises(DuplicateMemberError):
        merged([one])
    assert merged([one], superseded=superseded_in([one]))["a"][1] == b"2"


def test_stream_tells_the_images_shell(tmp_path):
    one = layer(tmp_path, symlink("bin", "usr/bin"), symlink("usr/bin/sh", "dash"))
    assert write_stream(io.BytesIO(), [one], {}, "", EPOCH) == "dash"
    assert write_stream(io.BytesIO(), [layer(tmp_path, file("bin/sh"))], {}, "", EPOCH) == ""
