"""Layers merged as overlayfs would show them."""

import pytest
from helpers.errors import error_of
from helpers.layer_tars import device, entry, fifo, file, folder, hard_link, layer, seen, symlink

from envbuild.core.errors import CheckRefusedError
from envbuild.rootfs.overlay import Overlay, merged, superseded_in

D = "(directory)"

MERGED = {
    "names come without dots and slashes": (
        [[folder("./"), folder("./a/"), file("./a//b", b"1")]],
        {"a": D, "a/b": "1"},
    ),
    "whiteouts hide names below them": (
        [
            [folder("a"), file("a/x", b"1"), folder("b"), file("b/y", b"2"), file("c", b"3")],
            [file("a/.wh.x"), file(".wh.b"), file(".wh.nothing")],
        ],
        {"a": D, "c": "3"},
    ),
    "a whiteout does not hide what its own layer has": (
        [[folder("a"), file("a/old", b"1")], [folder("a"), file("a/new", b"2"), file(".wh.a")]],
        {"a": D, "a/new": "2"},
    ),
    "an opaque directory hides what lower layers have in it": (
        [
            [folder("a"), file("a/x", b"1"), folder("a/d"), file("a/d/y", b"2"), file("b", b"3")],
            [folder("a"), file("a/.wh..wh..opq"), file("a/new", b"4")],
        ],
        {"a": D, "a/new": "4", "b": "3"},
    ),
    "an opaque root hides everything below": (
        [[file("x", b"1"), file("a/y", b"1")], [file(".wh..wh..opq"), file("new", b"2")]],
        {"new": "2"},
    ),
    "a whiteout hides through a layer that has the name again": (
        [[folder("a"), file("a/x", b"1")], [file(".wh.a")], [folder("a"), file("a/y", b"2")]],
        {"a": D, "a/y": "2"},
    ),
    "a file over a directory hides what is in it": (
        [[folder("a"), file("a/x", b"1"), folder("a/b"), file("a/b/c", b"2")], [file("a", b"now a file")]],
        {"a": "now a file"},
    ),
    "a directory over a file": ([[file("a", b"1")], [file("a/x", b"2")]], {"a": D, "a/x": "2"}),
    "a directory over a link wins": (
        [[folder("usr"), folder("usr/lib"), file("usr/lib/x", b"1"), symlink("lib", "usr/lib")], [file("lib/y", b"2")]],
        {"usr": D, "usr/lib": D, "usr/lib/x": "1", "lib": D, "lib/y": "2"},
    ),
    "hard links within a layer come after their file": (
        [[file("z", b"1"), hard_link("a", "z"), hard_link("b", "./a"), hard_link("c", "/z")]],
        {"z": "1", "a": "= z", "b": "= z", "c": "= z"},
    ),
    "hard links to files of a lower layer": (
        [[file("a", b"1"), hard_link("a2", "a")], [], [hard_link("b", "a"), hard_link("c", "a2")]],
        {"a": "1", "b": "= a", "c": "= a", "a2": "= a"},
    ),
    "a hard link across layers to a file that a third hides": (
        [[file("a", b"old")], [hard_link("b", "a")], [file(".wh.a")]],
        {"b": "old"},
    ),
    "a hard link whose own name is hidden": (
        [[file("a", b"1"), hard_link("b", "a"), hard_link("c", "b")], [file(".wh.b")]],
        {"a": "1", "c": "= a"},
    ),
    "hard links to links and FIFOs are made anew": (
        [
            [symlink("s", "/x"), fifo("p"), hard_link("s2", "s"), hard_link("p2", "p")],
            [hard_link("s3", "s"), file("p", b"1")],
        ],
        {"s": "-> /x", "s2": "-> /x", "s3": "-> /x", "p2": "(FIFO)", "p": "1"},
    ),
    "devices in dev are left out": (
        [[folder("dev"), device("dev/null"), symlink("dev/fd", "/proc/self/fd")]],
        {"dev": D, "dev/fd": "-> /proc/self/fd"},
    ),
    "the same hard link twice is one": (
        [[file("a", b"1"), hard_link("b", "a"), hard_link("b", "a")]],
        {"a": "1", "b": "= a"},
    ),
}


@pytest.mark.parametrize(("layers", "shown"), MERGED.values(), ids=MERGED)
def test_what_containers_see(tmp_path, layers, shown):
    assert seen(*[layer(tmp_path, *items) for items in layers]) == shown


def test_a_directory_that_was_taken_away_and_is_back_has_no_attributes_of_the_old(tmp_path):
    low = layer(tmp_path, folder("a", 0o711))
    up = layer(tmp_path, file(".wh.a"), file("a/new", b"2"))
    assert {member.name: member.mode for member, _ in merged([low, up])} == {"a": 0o755, "a/new": 0o644}


def test_a_file_between_two_directories_hides_the_lower(tmp_path):
    lowest = layer(tmp_path, folder("a", 0o711), file("a/old", b"1"))
    middle = layer(tmp_path, file("a", b"2"))
    top = layer(tmp_path, file("a/new", b"3"))
    assert seen(lowest, middle, top) == {"a": D, "a/new": "3"}
    assert {member.name: member.mode for member, _ in merged([lowest, middle, top])}["a"] == 0o755


def test_directories_that_only_their_children_tell_of(tmp_path):
    low = layer(tmp_path, folder("a", 0o700), file("a/x", b"1"))
    up = layer(tmp_path, file("a/b/c", b"2"))
    found = {member.name: (member.mode, member.mtime, member.layer) for member, _ in merged([low, up])}
    assert found["a"][0] == 0o700
    assert found["a/b"] == (0o755, 0, -1)
    assert {m.name: m.mtime for m, _ in merged([low, up], Overlay(mtime=7))}["a/b"] == 7


def test_a_hard_link_to_a_file_whose_name_is_hidden_above(tmp_path):
    low = layer(tmp_path, file("a", b"old", mode=0o751), hard_link("b", "a"), hard_link("c", "a"))
    up = layer(tmp_path, file("a", b"new"))
    assert seen(low, up) == {"a": "new", "b": "old", "c": "= b"}
    assert {member.name: member.mode for member, _ in merged([low, up])}["b"] == 0o751


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([hard_link("b", "nothing")], "none below has it"),
        ([hard_link("b", "b")], "itself"),
        ([hard_link("b", "a"), file("a", b"1")], "A hard link to it comes before it"),
        ([folder("a"), hard_link("b", "a")], "a directory"),
        ([hard_link("b", "../a")], "'..'"),
        ([hard_link("b", "/")], "a directory"),
        ([file("a"), hard_link("b", "a"), file("a", b"2")], "which the layer has twice"),
        ([file("a"), file("c"), hard_link("b", "a"), hard_link("b", "c")], "twice, and once as a hard link"),
        ([file("/etc/passwd")], "absolute"),
        ([file("../x")], "'..'"),
        ([file("a/../../x")], "'..'"),
        ([file("")], "has no name"),
        ([symlink(".", "x")], "has no name"),
        ([symlink("a", "/etc"), file("a/passwd")], "lies below 'a', which is not a directory"),
        ([symlink("a", "b"), folder("a/b")], "lies below 'a', which is not a directory"),
        ([file("a/b"), symlink("a", "/etc")], "as a directory and as a symbolic link"),
        ([symlink("a", "b"), folder("a")], "as a directory and as something else"),
        ([file("a"), file("a/.wh.x")], "lies below 'a'"),
        ([device("etc/null")], "character device"),
        ([entry("x", b"4")], "block device"),
        ([file(".wh..wh.x")], "whiteout of a whiteout"),
        ([file("a/.wh..wh.plnk")], "whiteout of a whiteout"),
        ([file(".wh.")], "whiteout of a directory itself"),
        ([file("a/.wh..")], "whiteout of a directory itself"),
        ([file("a/.wh...")], "whiteout of a directory itself"),
        ([file(".wh.a/b")], "below a whiteout"),
        ([folder(".wh.a")], "whiteout and a directory"),
        ([symlink("a", "")], "empty name"),
        ([file("x" * 256)], "too long"),
        ([file("ü" * 128)], "too long"),
        ([file("/".join(["x" * 100] * 41))], "too long"),
        ([file("/".join("d" * 257))], "more than 255 directories"),
        ([entry("a", b"Z")], "type is b'Z'"),
    ],
)
def test_refused(tmp_path, items, why):
    error = error_of(CheckRefusedError, seen, layer(tmp_path, file("fine")), layer(tmp_path, *items), layer(tmp_path))
    assert why in error.why
    assert error.what.startswith(f"layer {tmp_path}/layer1.tar.gz is refused: its member ")
    assert error.fix


def test_a_hard_link_to_what_a_layer_between_took_away_is_refused(tmp_path):
    low = layer(tmp_path, file("d/a", b"1"))
    for hiding in (file("d/.wh.a"), file(".wh.d"), file("d/.wh..wh..opq"), file("d"), folder("d/a")):
        with pytest.raises(CheckRefusedError, match=r"member 'b'"):
            seen(low, layer(tmp_path, hiding), layer(tmp_path, hard_link("b", "d/a")))


def test_its_own_whiteout_takes_the_file_of_a_hard_link_away(tmp_path):
    with pytest.raises(CheckRefusedError, match=r"member 'b'"):
        seen(layer(tmp_path, file("a")), layer(tmp_path, hard_link("b", "a"), file(".wh.a")))


def test_hidden_members_are_refused_too(tmp_path):
    bad = layer(tmp_path, symlink("a", "/etc"), file("a/passwd"))
    with pytest.raises(CheckRefusedError, match="its member 'a/passwd'"):
        seen(bad, layer(tmp_path, file(".wh.a")))


def test_a_hard_link_to_a_device_is_refused(tmp_path):
    with pytest.raises(CheckRefusedError, match="its member 'x'"):
        seen(layer(tmp_path, device("dev/null"), hard_link("x", "dev/null")))


def test_of_a_name_that_a_layer_has_twice_the_last_holds(tmp_path):
    items = [file("a", b"1"), folder("d", 0o700), file("a", b"22"), symlink("s", "x"), symlink("s", "y")]
    one = layer(tmp_path, *items, folder("d", 0o711), file("t", b"3"), symlink("t", "z"))
    assert seen(one) == {"a": "22", "d": D, "s": "-> y", "t": "-> z"}
    assert {member.name: member.mode for member, _ in merged([one])}["d"] == 0o711
    assert [member.name for member, _ in merged([one]) if member.replaces] == ["a", "t"]


def test_with_superseded_no_name_comes_twice(tmp_path):
    one = layer(tmp_path, file("a", b"1"), file("a", b"2"), file("t", b"3"), symlink("t", "z"), file("a", b"3"))
    left_out = superseded_in([layer(tmp_path, file("a")), one])
    assert left_out == {(1, 0), (1, 1), (1, 2)}
    members = [member for member, _ in merged([layer(tmp_path), one], superseded=left_out)]
    assert sorted(member.name for member in members) == ["a", "t"]
    assert not any(member.replaces for member in members)


def test_files_of_the_caller_are_over_the_image(tmp_path):
    low = layer(tmp_path, file("etc/rc", b"old"), hard_link("copy", "etc/rc"), file("etc/fstab/x", b"1"))
    assert seen(low, overlay=Overlay(files=["etc/rc", "etc/fstab"])) == {"copy": "old", "etc": D}


def test_emptied_directories(tmp_path):
    low = layer(tmp_path, folder("dev", 0o700), file("dev/core", b"1"), hard_link("core", "dev/core"))
    assert seen(low, overlay=Overlay(emptied=["dev"])) == {"dev": D, "core": "1"}


def test_folders_of_the_caller_are_yielded_last(tmp_path):
    low = layer(tmp_path, folder("srv", 0o700), symlink("app", "srv/x"), file("f", b"1"))
    found = seen(low, overlay=Overlay(folders=["srv/a/b", "app", "app/deep", "f/x"]))
    assert found == {"srv": D, "srv/a": D, "srv/a/b": D, "app": "-> srv/x", "f": "1"}


def test_stopping_early_ends_the_reading(tmp_path):
    import threading

    before = threading.active_count()
    members = merged([layer(tmp_path, *[file(f"{n}", bytes(100_000)) for n in range(200)])])
    next(members)
    members.close()
    assert threading.active_count() == before
