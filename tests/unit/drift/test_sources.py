"""Reading wheels, sdists and directories."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.drift import SourceTree

METADATA = "Metadata-Version: 2.1\nName: Lib.Core\nVersion: 1.2\n\nName: not this\n"
FILES = {
    "lib/core/__init__.py": "",
    "lib/core/ops.py": "x = 1",
    "lib/core/fast.cpython-312-x86_64-linux-gnu.so": "",
    "lib/core/data.json": "{}",
    **{f"{folder}/__init__.py": "" for folder in ("tests", "test", "examples", "scripts", "docs", "tools")},
    **{f"{folder}/a.py": "" for folder in ("benchmarks", "3rdparty")},
    "setup.py": "",
}


OTHER = {"lib/METADATA": "Name: wrong\nVersion: 0\n", "a-1.dist-info/RECORD": "Name: wrong\nVersion: 0\n"}


def wheel(path: Path, files: dict[str, str], metadata: str = METADATA) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**OTHER, **files, "lib_core-1.2.dist-info/METADATA": metadata}.items():
            archive.writestr(name, text)
    return path


def sdist(path: Path, files: dict[str, str], metadata: str = METADATA) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, "PKG-INFO": metadata}.items():
            member = tarfile.TarInfo(f"lib_core-1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        folder = tarfile.TarInfo("lib_core-1.2/lib.py")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return path


def check(tree: SourceTree) -> None:
    assert (tree.name, tree.version, tree.title) == ("lib-core", "1.2", "lib-core 1.2")
    assert set(tree.files) == {"lib/core/__init__.py", "lib/core/ops.py", "setup.py"}
    assert tree.files["lib/core/ops.py"] == b"x = 1"
    assert tree.compiled == {"lib.core.fast"}
    assert tree.modules["lib.core"] == "lib/core/__init__.py"
    assert tree.roots == {"lib.core"}


def test_wheel(tmp_path: Path):
    check(SourceTree.from_wheel(wheel(tmp_path / "a.whl", FILES)))


def test_wheel_with_a_data_folder(tmp_path: Path):
    files = {f"lib_core-1.2.data/purelib/{name}": text for name, text in FILES.items()}
    assert "lib/core/ops.py" in SourceTree.from_wheel(wheel(tmp_path / "a.whl", files)).files


@pytest.mark.parametrize("layout", ["", "src/"])
def test_sdist(tmp_path: Path, layout: str):
    files = {(layout + name if name.startswith("lib/") else name): text for name, text in FILES.items()}
    check(SourceTree.from_sdist(sdist(tmp_path / "a.tar.gz", files)))


def test_directory(tmp_path: Path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "folder.py").mkdir()
    check(SourceTree.from_directory(tmp_path, "Lib_Core", "1.2"))


def test_roots_are_the_outermost_packages_and_modules():
    files = dict.fromkeys(["ns/a/__init__.py", "ns/a/b/__init__.py", "ns/c/d.py", "one.py", "tests/__init__.py"], b"")
    assert SourceTree("x", "1", files).roots == {"ns.a", "one", "tests"}


def test_components_in_several_distributions():
    first = SourceTree("a", "1", {"lib/x.py": b"1"}, frozenset({"lib.c"}))
    joined = first.joined_with(SourceTree("b", "2", {"lib/x.py": b"2", "lib/y.py": b""}, frozenset({"lib.d"})))
    assert (joined.title, joined.files["lib/x.py"], joined.compiled) == ("a 1", b"1", {"lib.c", "lib.d"})
    assert set(joined.modules) == {"lib.x", "lib.y"}


def test_what_is_no_archive_is_refused(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_text("no archive")
    for read in (SourceTree.from_wheel, SourceTree.from_sdist):
        with pytest.raises(CheckRefusedError, match="broken"):
            read(broken)
        with pytest.raises(CheckRefusedError, match="absent"):
            read(tmp_path / "absent")
    cut = sdist(tmp_path / "cut.tar.gz", FILES)
    cut.write_bytes(cut.read_bytes()[:-60])
    with pytest.raises(CheckRefusedError, match=r"cut\.tar\.gz"):
        SourceTree.from_sdist(cut)


@pytest.mark.parametrize("metadata", ["", "Name: a\n", "Version: 1\n"])
def test_an_archive_without_a_name_or_version_is_refused(tmp_path: Path, metadata: str):
    with pytest.raises(CheckRefusedError) as refused:
        SourceTree.from_wheel(wheel(tmp_path / "a.whl", FILES, metadata))
    assert "name and version" in refused.value.why
    assert refused.value.fix


def test_an_empty_directory_is_refused(tmp_path: Path):
    with pytest.raises(CheckRefusedError):
        SourceTree.from_directory(tmp_path, "a", "1")
