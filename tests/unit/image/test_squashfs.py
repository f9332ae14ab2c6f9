"""What is fed to mksquashfs: the layers merged the way enroot lays them out."""

import io
import tarfile

import pytest

from envbuild.core.errors import InternalError
from envbuild.image.layers import LayerWriter
from envbuild.image.squashfs import write_merged

EPOCH = 100


def make_layer(path, files=(), directories=(), links=(), hard_links=(), owner=(7, 7)):
    """A layer straight from tarfile, so that it can hold what a tree of ours would not."""
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as tar:

        def add(name, kind, mode, data=b"", link=""):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.linkname, member.mtime = kind, mode, link, 50
            member.uid, member.gid = owner
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for name, mode in directories:
            add(name, tarfile.DIRTYPE, mode)
        for name, data, mode in files:
            add(name, tarfile.REGTYPE, mode, data)
        for name, link in links:
            add(name, tarfile.SYMTYPE, 0o777, link=link)
        for name, link in hard_links:
            add(name, tarfile.LNKTYPE, 0o644, link=link)
    return path


def merged(layers, extra=None, workdir=""):
    stream = io.BytesIO()
    write_merged(stream, layers, extra or {}, workdir, EPOCH)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        members = tar.getmembers()
        names = [member.name for member in members]
        assert len(names) == len(set(names)), "a path twice"
        return {member.name: (member, tar.extractfile(member).read() if member.isreg() else None) for member in members}


def test_merge_gives_everything_to_root(tmp_path):
    found = merged([make_layer(tmp_path / "a", files=[("x", b"1", 0o644)], directories=[("d", 0o755)])])
    assert {(member.uid, member.gid) for member, _ in found.values()} == {(0, 0)}


def test_merge_takes_the_upper_layer(tmp_path):
    lower = make_layer(tmp_path / "l", files=[("etc/a", b"lower", 0o644), ("etc/b", b"kept", 0o644)])
    upper = make_layer(tmp_path / "u", files=[("etc/a", b"upper", 0o600)])
    found = merged([lower, upper])
    assert found["etc/a"][1] == b"upper"
    assert found["etc/a"][0].mode == 0o600
    assert found["etc/b"][1] == b"kept"


def test_merge_replaces_a_link_by_a_file(tmp_path):
    lower = make_layer(tmp_path / "l", links=[("etc/rc", "/elsewhere")])
    found = merged([lower], {"etc/rc": b"script"})
    assert found["etc/rc"][0].isreg()
    assert found["etc/rc"][1] == b"script"


def test_merge_drops_what_is_in_dev_and_keeps_dev(tmp_path):
    layer = make_layer(
        tmp_path / "l", directories=[("dev", 0o755)], files=[("dev/null", b"", 0o666), ("devel", b"", 0)]
    )
    assert set(merged([layer])) == {"dev", "devel"}


def test_merge_opens_modes_for_the_owner(tmp_path):
    layer = make_layer(tmp_path / "l", directories=[("d", 0o500)], files=[("d/f", b"", 0o000), ("d/s", b"", 0o4711)])
    modes = {name: member.mode for name, (member, _) in merged([layer]).items()}
    assert modes == {"d": 0o700, "d/f": 0o400, "d/s": 0o4711}


def test_merge_keeps_hard_links_within_a_layer(tmp_path):
    layer = make_layer(tmp_path / "l", files=[("a", b"1", 0o644)], hard_links=[("b", "a")])
    found = merged([layer])
    assert (found["b"][0].islnk(), found["b"][0].linkname) == (True, "a")


def test_merge_refuses_a_hard_link_to_what_is_replaced(tmp_path):
    lower = make_layer(tmp_path / "l", files=[("a", b"1", 0o644)], hard_links=[("b", "a")])
    upper = make_layer(tmp_path / "u", files=[("a", b"2", 0o644)])
    with pytest.raises(InternalError, match="hard link"):
        merged([lower, upper])


def test_merge_makes_the_working_directory_with_its_parents(tmp_path):
    layer = make_layer(tmp_path / "l", directories=[("srv", 0o700)])
    found = merged([layer], workdir="/srv/a/b")
    assert found["srv"][0].mode == 0o700
    assert found["srv/a"][0].isdir()
    assert found["srv/a/b"][0].mtime == EPOCH


def test_merge_keeps_times_of_layers(tmp_path):
    with LayerWriter(tmp_path / "l.tar.gz", 33) as writer:
        writer.add_bytes("x", b"")
    assert merged([tmp_path / "l.tar.gz"])["x"][0].mtime == 33
