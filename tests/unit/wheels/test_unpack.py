"""A package's sources: unpacked over an ended build, and patched."""

import contextlib
import io
import tarfile
import zipfile

import pytest
from helpers.simple_index import make_sdist

from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.build.unpack import apply_patches, unpack

PATCH = b"""\
Why it is needed.

--- a/setup.py
+++ b/setup.py
@@ -1,2 +1,2 @@
-answer = 41
+answer = 42
 done = True
"""


def sdist(tmp_path, text="answer = 41\ndone = True\n") -> bytes:
    return make_sdist(tmp_path, "thing", "1.0", files={"setup.py": text}).read_bytes()


def test_object_files_stay_and_all_else_is_as_it_was(tmp_path):
    archive = sdist(tmp_path)
    source = unpack("thing 1.0", archive, tmp_path / "s")
    times = (source / "setup.py").stat().st_mtime_ns
    for name in ("build/temp.linux/a.o", "build/lib.linux/thing.so", "build/bdist.linux/wheel/x"):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text("made")
    (source / "setup.py").write_text("changed by the build")
    assert unpack("thing 1.0", archive, tmp_path / "s") == source
    assert (source / "setup.py").read_text() == "answer = 41\ndone = True\n"
    assert (source / "setup.py").stat().st_mtime_ns == times
    assert (source / "build/temp.linux/a.o").read_text() == "made"
    assert not (source / "build/lib.linux").exists()
    assert not (source / "build/bdist.linux").exists()


def test_a_zip_file_has_one_time_however_often_it_is_unpacked(tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("thing-1.0/setup.py", "answer = 41\n")
    source = unpack("thing 1.0", content.getvalue(), tmp_path / "s")
    assert (source / "setup.py").stat().st_mtime == 315619200


@pytest.mark.parametrize(("names", "message"), [(["a/x", "b/x"], "2 folders on top"), (["x"], "0 folders on top")])
def test_an_archive_without_one_folder_on_top_is_refused(tmp_path, names, message):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    with pytest.raises(CheckRefusedError) as refused:
        unpack("thing 1.0", content.getvalue(), tmp_path / "s")
    assert message in refused.value.why


def test_the_folder_that_is_built_may_be_inside(tmp_path):
    archive = make_sdist(tmp_path, "thing", "1.0", files={"python/setup.py": "answer = 41\n"}).read_bytes()
    tree = unpack("thing 1.0", archive, tmp_path / "s", "python")
    assert (tree / "python/setup.py").is_file()
    (tree / "python/build/lib.linux").mkdir(parents=True)
    assert unpack("thing 1.0", archive, tmp_path / "s", "python") == tree
    assert not (tree / "python/build/lib.linux").exists()
    for absent in ("rust", "python/setup.py", "..", "../.."):
        with pytest.raises(CheckRefusedError) as refused:
            unpack("thing 1.0", archive, tmp_path / "s", absent)
        assert refused.value.why == f"it has no folder {absent}"


def test_patches_change_the_sources_and_leave_their_times_the_same(tmp_path):
    archive = sdist(tmp_path)
    times = []
    for _ in range(2):
        source = unpack("thing 1.0", archive, tmp_path / "s")
        apply_patches("thing 1.0", source, [("a.patch", PATCH)])
        assert (source / "setup.py").read_text() == "answer = 42\ndone = True\n"
        times.append((source / "setup.py").stat().st_mtime_ns)
    assert times[0] == times[1]


def test_a_patch_that_does_not_apply_is_named(tmp_path):
    source = unpack("thing 1.0", sdist(tmp_path, "something = 'else'\n"), tmp_path / "s")
    with pytest.raises(CheckRefusedError, match=r"the patch a\.patch does not apply to thing 1\.0") as refused:
        apply_patches("thing 1.0", source, [("a.patch", PATCH)])
    assert "setup.py" in refused.value.why


def tar_of(*members: tuple[str, bytes, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            archive.addfile(member)
    return content.getvalue()


@pytest.mark.parametrize("looks", [True, False], ids=["python looks", "python does not look"])
@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("/evil", tarfile.REGTYPE, "")],
        [("top/x/../../../evil", tarfile.REGTYPE, "")],
        [("top/out", tarfile.SYMTYPE, "../.."), ("top/out/evil", tarfile.REGTYPE, "")],
        [
            ("top/in", tarfile.SYMTYPE, "../.."),
            ("top/m", tarfile.SYMTYPE, "in/.."),
            ("top/m/evil", tarfile.REGTYPE, ""),
        ],
        [("top/hard", tarfile.LNKTYPE, "../evil")],
        [("top/null", tarfile.CHRTYPE, "")],
    ],
)
def test_nothing_of_an_archive_lies_outside_of_its_folder(tmp_path, monkeypatch, members, looks):
    """Debian 12's Python does not look at what it extracts."""
    if not looks:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    inner = tmp_path / "a/b/s"
    with contextlib.suppress(CheckRefusedError):
        unpack("thing 1.0", tar_of(("top/setup.py", tarfile.REGTYPE, ""), *members), inner)
    assert not list(tmp_path.rglob("*null"))
    assert [path for path in tmp_path.rglob("*evil") if not path.is_relative_to(inner)] == []


def test_archive_is_unpacked_without_tarfile_filters(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    source = unpack("thing 1.0", sdist(tmp_path), tmp_path / "s")
    assert (source / "setup.py").read_text() == "answer = 41\ndone = True\n"
    assert (source / "setup.py").stat().st_mode & 0o777 == 0o644
