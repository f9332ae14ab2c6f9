"""Every difference of files is found, whichever layers they lie in, and nothing else."""

import pytest
from helpers.layer_tars import file, folder, hard_link, layer, symlink

from envbuild.core.text import printable
from envbuild.image.inspect.file_diff import different_files
from envbuild.oci.layout import Image, ImageLayer
from envbuild.oci.models import Configuration

BASE = [
    folder("etc"),
    file("etc/a", b"one"),
    symlink("etc/l", "a"),
    file("etc/twin", b"t"),
    hard_link("etc/h", "etc/twin"),
]


def image(tmp_path, *layers):
    tmp_path.mkdir(exist_ok=True)
    blobs = [layer(tmp_path, *items) for items in layers]
    opened = tuple(
        ImageLayer(digest=str(blob.file), size_bytes=1, name="", members=lambda: iter(()), blob=blob) for blob in blobs
    )
    return Image(digest="", config=Configuration(), layers=opened)


def differences(tmp_path, old, new, *, times=False):
    first, second = image(tmp_path / "old", *old), image(tmp_path / "new", *new)
    return [difference.line() for difference in different_files(first, second, times=times)]


def test_hidden_files_do_not_count(tmp_path):
    hidden = [folder("etc"), file("etc/gone", b"x")]
    assert differences(tmp_path, [BASE], [hidden, [*BASE, file("etc/.wh.gone")]]) == []


def test_which_name_is_the_hard_link_does_not_count(tmp_path):
    other = [*BASE[:3], file("etc/h", b"t"), hard_link("etc/twin", "etc/h")]
    assert differences(tmp_path, [BASE], [other]) == []


@pytest.mark.parametrize(
    ("items", "lines"),
    [
        ([file("etc/b", b"new")], ["added: /etc/b"]),
        ([file("etc/.wh.a")], ["removed: /etc/a"]),
        ([file("etc/a", b"one", mode=0o600)], ["changed: /etc/a  mode 0644 -> 0600"]),
        ([file("etc/a", b"one", uid=7)], ["changed: /etc/a  owner 0:0 -> 7:0"]),
        ([symlink("etc/l", "b")], ["changed: /etc/l  link a -> b"]),
        ([file("etc/odd\n", b"")], ["added: /etc/odd\\n"]),
        ([file("etc/a", b"one", mtime=5)], []),
    ],
)
def test_difference_is_printed(tmp_path, items, lines):
    assert differences(tmp_path, [BASE], [BASE, items]) == lines


def test_content_and_type(tmp_path):
    (line,) = differences(tmp_path, [BASE], [BASE, [file("etc/a", b"two")]])
    assert line.startswith("changed: /etc/a  content sha256:7692c3ad")
    other = tmp_path / "type"
    other.mkdir()
    (line,) = differences(other, [BASE], [BASE, [symlink("etc/a", "l")]])
    assert "kind file -> symbolic link" in line
    assert "link - -> l" in line


def test_times_count_with_the_option(tmp_path):
    changed = [BASE, [file("etc/a", b"one", mtime=5)]]
    assert differences(tmp_path, [BASE], changed, times=True) == ["changed: /etc/a  mtime 1600000000 -> 5"]


def test_names_in_any_bytes(tmp_path):
    name = b"etc/\xff".decode("utf-8", "surrogateescape")
    (line,) = differences(tmp_path, [BASE], [BASE, [symlink(name, name)]])
    assert line == "added: /etc/\\udcff"
    assert printable("/plain ü\\") == "/plain ü\\"
    assert printable("a\x1b[2J\n\x9b\u202eü") == "a\\x1b[2J\\n\\x9b\\u202eü"
