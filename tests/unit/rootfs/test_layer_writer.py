"""Layers: a function of the files alone, whatever the file system, the clock, the umask and the names."""

import os
import random
import socket
import stat
import tarfile
from pathlib import Path

import pytest
from helpers.layer_tars import read_members

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.rootfs.layer import LayerRecord
from envbuild.rootfs.layer_writer import LayerWriter, plain_rights, walk

EPOCH = 1_700_000_000
ODD_NAMES = [
    b"with space",
    b"-leading-dash",
    b"new\nline",
    b"tab\tand\x01control",
    "ünïcödé".encode(),
    b"no-utf8-\xff\xfe",
    b"x" * 255,
    b"a/" * 60 + b"deep-enough-for-a-long-name-header",
]


def write(path: Path, tree: Path, prefix: str = "", **rules) -> LayerRecord:
    with LayerWriter(path, EPOCH) as writer:
        writer.add_tree(tree, prefix, **rules)
    return writer.record("test")


def digest(tmp_path: Path, tree: Path, **rules) -> str:
    path = tmp_path / f"{random.random()}.tar.gz"
    return write(path, tree, **rules).digest


def make_tree(root: Path, names: list[bytes], seed: int = 0) -> Path:
    root.mkdir()
    names = list(names)
    random.Random(seed).shuffle(names)
    for name in names:
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as stream:
            stream.write(b"content of " + name)
    return root


def members_of(path: Path) -> dict[str, tarfile.TarInfo]:
    return {member.name: member for member, _ in read_members(path)}


def test_layer_does_not_depend_on_the_order_in_which_files_were_made(tmp_path):
    trees = [make_tree(tmp_path / str(seed), ODD_NAMES, seed) for seed in range(3)]
    assert len({digest(tmp_path, tree) for tree in trees}) == 1


def test_layer_does_not_depend_on_time_stamps(tmp_path):
    tree = make_tree(tmp_path / "tree", [b"a", b"d/b"])
    before = digest(tmp_path, tree)
    os.utime(tree / "a", (1, 1))
    os.utime(tree / "d", (2, 2))
    assert digest(tmp_path, tree) == before


def test_layer_differs_when_content_mode_or_target_differs(tmp_path):
    tree = make_tree(tmp_path / "tree", [b"a", b"b"])
    (tree / "link").symlink_to("a")
    digests = {digest(tmp_path, tree)}
    (tree / "a").write_bytes(b"other")
    digests.add(digest(tmp_path, tree))
    (tree / "b").chmod(0o755)
    digests.add(digest(tmp_path, tree))
    (tree / "link").unlink()
    (tree / "link").symlink_to("b")
    digests.add(digest(tmp_path, tree))
    assert len(digests) == 4


def test_layer_keeps_hard_links_and_stores_their_content_once(tmp_path):
    tree = make_tree(tmp_path / "tree", [b"first"])
    os.link(tree / "first", tree / "second")
    write(tmp_path / "layer.tar.gz", tree, "usr")
    members = members_of(tmp_path / "layer.tar.gz")
    assert members["usr/first"].isreg()
    assert (members["usr/second"].islnk(), members["usr/second"].linkname) == (True, "usr/first")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_layer_with_plain_modes_does_not_depend_on_the_umask(tmp_path, umask):
    old = os.umask(umask)
    try:
        tree = make_tree(tmp_path / "tree", [b"d/a", b"d/run"])
        os.chmod(tree / "d/run", stat.S_IMODE(os.stat(tree / "d/run").st_mode) | 0o100)
    finally:
        os.umask(old)
    write(tmp_path / "layer.tar.gz", tree, rights=plain_rights)
    modes = {name: member.mode for name, member in members_of(tmp_path / "layer.tar.gz").items()}
    assert modes == {"d": 0o755, "d/a": 0o644, "d/run": 0o755}


def test_layer_refuses_a_socket(tmp_path):
    tree = make_tree(tmp_path / "t", [b"a"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "s"))
        with pytest.raises(CheckRefusedError, match="cannot be put into a layer"):
            write(tmp_path / "layer.tar.gz", tree)


def test_walk_goes_by_the_bytes_of_names(tmp_path):
    tree = make_tree(tmp_path / "tree", [b"b/z", b"a-b", b"a/c", b"B", b"a.b"])
    assert [name for _, name, _ in walk(tree)] == ["B", "a", "a-b", "a.b", "b", "a/c", "b/z"]


def test_layer_whose_end_cannot_be_written_is_closed(tmp_path, monkeypatch):
    def refuse(_):
        raise MachineError("the disk is full")

    monkeypatch.setattr(tarfile.TarFile, "close", refuse)
    with pytest.raises(MachineError, match="the disk is full"), LayerWriter(tmp_path / "x.tar.gz", EPOCH) as writer:
        pass
    assert writer._gzip._stream.closed
