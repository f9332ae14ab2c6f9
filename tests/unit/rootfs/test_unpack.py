"""Merged layers in a directory, and nothing outside of it."""

import contextlib
import os
import stat

import pytest
from helpers.layer_tars import EPOCH, fifo, file, folder, hard_link, layer, symlink

from envbuild.core.errors import CheckRefusedError
from envbuild.rootfs import unpack as unpacking
from envbuild.rootfs.layer_writer import walk
from envbuild.rootfs.members import Kind, Member
from envbuild.rootfs.unpack import unpack


def unpacked(tmp_path, *layers):
    root = tmp_path / "root"
    root.mkdir()
    unpack(layers, root)
    return root


@pytest.fixture
def blobs(tmp_path):
    folder = tmp_path / "blobs"
    folder.mkdir()
    return folder


def test_unpack_writes_what_is_seen(tmp_path, blobs):
    low = layer(blobs, folder("a", 0o555), file("a/x", b"1", mode=0o751), symlink("l", "/etc"), file("gone"))
    up = layer(blobs, file("a/y", b"2" * 3_000_000), hard_link("z", "a/x"), fifo("p"), file(".wh.gone"))
    root = unpacked(tmp_path, low, up)
    assert sorted(name for _, name, _ in walk(root)) == ["a", "a/x", "a/y", "l", "p", "z"]
    assert (root / "a/y").read_bytes() == b"2" * 3_000_000
    assert (root / "z").stat().st_ino == (root / "a/x").stat().st_ino
    assert stat.S_IMODE((root / "a/x").stat().st_mode) == 0o751
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o755
    assert os.readlink(root / "l") == "/etc"
    assert stat.S_ISFIFO((root / "p").lstat().st_mode)
    assert {(root / name).lstat().st_mtime for name in ("a", "a/x", "l")} == {EPOCH}


def test_unpack_leaves_out_set_user_id_bits_and_write_access(tmp_path, blobs):
    items = [file("su", mode=0o6755), folder("d", 0o3777), file("sealed", b"x", mode=0o4000)]
    root = unpacked(tmp_path, layer(blobs, *items))
    modes = {name: stat.S_IMODE(info.st_mode) for _, name, info in walk(root)}
    assert modes == {"su": 0o755, "d": 0o755, "sealed": 0o600}


def test_unpack_of_a_name_that_a_layer_has_twice(tmp_path, blobs):
    root = unpacked(tmp_path, layer(blobs, file("a", b"long" * 99), file("a", b"2"), file("b"), symlink("b", "a")))
    assert (root / "a").read_bytes() == b"2"
    assert os.readlink(root / "b") == "a"


@pytest.mark.parametrize(
    "hostile",
    [
        [symlink("d", ".."), file("d/victim", b"x")],
        [symlink("d", "../victim"), file("d", b"x")],
        [symlink("d", "/"), folder("d/e"), file("d/e/f", b"x")],
        [file("../victim", b"x")],
        [hard_link("l", "../victim"), file("l", b"x")],
        [hard_link("l", "/victim")],
        [file("a/../../victim", b"x")],
    ],
)
def test_nothing_outside_is_touched(tmp_path, blobs, hostile):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    before = sorted(os.listdir(tmp_path))
    with contextlib.suppress(CheckRefusedError):
        unpacked(tmp_path, layer(blobs, *hostile))
    assert victim.read_bytes() == b"mine"
    assert sorted(set(os.listdir(tmp_path)) - {"root"}) == before


def test_a_link_below_a_directory_of_an_upper_layer_is_not_followed(tmp_path, blobs):
    outside = tmp_path / "outside"
    outside.mkdir()
    low = layer(blobs, symlink("d", str(outside)))
    root = unpacked(tmp_path, low, layer(blobs, file("d/x", b"1")))
    assert os.listdir(outside) == []
    assert (root / "d/x").read_bytes() == b"1"


def test_unpack_does_not_follow_a_link_in_the_way(tmp_path, monkeypatch):
    """The merged view never has one: what would be done if it had."""
    (tmp_path / "root").mkdir()
    members = [Member("d", Kind.SYMLINK, link=str(tmp_path)), Member("d/x", Kind.SYMLINK, link="y")]
    monkeypatch.setattr(unpacking, "merged", lambda layers, overlay: iter([(member, None) for member in members]))
    with pytest.raises(CheckRefusedError, match="'d/x' cannot be unpacked"):
        unpack([], tmp_path / "root")
    assert os.listdir(tmp_path) == ["root"]


def test_unpack_refuses_a_directory_with_something_in_it(tmp_path, blobs):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/x").touch()
    with pytest.raises(CheckRefusedError, match="cannot unpack into"):
        unpack([layer(blobs, file("a"))], tmp_path / "root")


def test_unpack_where_letters_have_no_case(tmp_path, blobs, monkeypatch):
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: real(path.lower() if path == "README" else path, *rest, **more)
    )
    with pytest.raises(CheckRefusedError, match="'README' cannot be unpacked here"):
        unpacked(tmp_path, layer(blobs, file("readme"), file("README")))
