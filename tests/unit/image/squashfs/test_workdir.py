"""A working directory into which no container can change is refused, whichever layers decide that."""

import io

import pytest
from helpers.layer_tars import file, folder, hard_link, layer, symlink

from envbuild.core.errors import CheckRefusedError
from envbuild.image.squashfs.tar_stream import write_stream

ITEMS = [
    folder("srv"),
    folder("srv/app"),
    file("etc/passwd"),
    file("a file"),
    hard_link("other", "a file"),
    symlink("good", "srv/app"),
    symlink("srv/up", "../srv/./app/"),
    symlink("twice", "/good"),
    symlink("dangling", "nowhere"),
    symlink("to-file", "etc/passwd"),
    symlink("out", "../../srv"),
    symlink("loop", "loop"),
    symlink("mounted", "/proc/self/cwd"),
    symlink("long", "x" * 300),
]


def stream(tmp_path, workdir, *upper):
    sink = io.BytesIO()
    write_stream(sink, [layer(tmp_path, *ITEMS), layer(tmp_path, *upper)], {"etc/rc": b"x"}, workdir, 0)
    return sink.getvalue()


@pytest.mark.parametrize(
    "workdir",
    ["", "/", "/srv", "/srv/app/", "/new/one", "/srv/new", "/good", "/good/new", "/srv/up", "/twice/x/y", "/out/app",
     "/mounted", "/dev/shm"],
)  # fmt: skip
def test_working_directory_that_exists_or_can_be_made_passes(tmp_path, workdir):
    assert stream(tmp_path, workdir).endswith(bytes(1024))


@pytest.mark.parametrize(
    ("workdir", "why"),
    [
        ("/etc/passwd", "'/etc/passwd' is in the image, and is not a directory"),
        ("/a file/x", "'/a file' is in the image"),
        ("/other", "'/other' is in the image"),
        ("/etc/rc", "'/etc/rc' is in the image"),
        ("/dangling", "It leads to '/nowhere'"),
        ("/dangling/x", "It leads to '/nowhere'"),
        ("/to-file", "It leads to '/etc/passwd'"),
        ("/loop", "It leads to '/loop'"),
        ("/long", "It leads to '/xxx"),
    ],
)
def test_working_directories_that_are_not_directories(tmp_path, workdir, why):
    with pytest.raises(CheckRefusedError, match="working directory") as caught:
        stream(tmp_path, workdir)
    assert why in caught.value.why


def test_upper_layers_decide(tmp_path):
    stream(tmp_path, "/dangling", folder("nowhere"))
    stream(tmp_path, "/a file", file(".wh.a file"), file("x"))
    with pytest.raises(CheckRefusedError):
        stream(tmp_path, "/srv/app", file(".wh.srv"), file("srv"))
