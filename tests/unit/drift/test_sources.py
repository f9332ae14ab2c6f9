"""Reading wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.drift.sources import SourceTree

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


@pytest.mark.parametrize("layout", ["", "src/"])
def test_wheel(tmp_path: Path, layout: str):
    files = {(layout + name if name.startswith("lib/") else name): text for name, text in FILES.items()}
    tree = SourceTree.from_wheel(wheel(tmp_path / "a.whl", files))
    assert (tree.name, tree.version, tree.title) == ("lib-core", "1.2", "lib-core 1.2")
    assert set(tree.files) == {"lib/core/__init__.py", "lib/core/ops.py", "setup.py"}
    assert tree.files["lib/core/ops.py"] == b"x = 1"
    assert tree.compiled == {"lib.core.fast"}
    assert tree.modules["lib.core"] == "lib/core/__init__.py"
    assert tree.roots == {"lib.core"}


def test_wheel_with_a_data_folder(tmp_path: Path):
    files = {f"lib_core-1.2.data/purelib/{name}": text for name, text in FILES.items()}
    assert "lib/core/ops.py" in SourceTree.from_wheel(wheel(tmp_path / "a.whl", files)).files


def test_roots_are_the_outermost_packages_and_modules():
    files = dict.fromkeys(["ns/a/__init__.py", "ns/a/b/__init__.py", "ns/c/d.py", "one.py", "tests/__init__.py"], b"")
    assert SourceTree("x", "1", files).roots == {"ns.a", "one", "tests"}


def test_file_that_is_not_an_archive_is_refused(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_text("no archive")
    for path in (broken, tmp_path / "absent"):
        with pytest.raises(CheckRefusedError, match=path.name):
            SourceTree.from_wheel(path)


@pytest.mark.parametrize("metadata", ["", "Name: a\n", "Version: 1\n"])
def test_an_archive_without_a_name_or_version_is_refused(tmp_path: Path, metadata: str):
    with pytest.raises(CheckRefusedError) as refused:
        SourceTree.from_wheel(wheel(tmp_path / "a.whl", FILES, metadata))
    assert "name and version" in refused.value.why
    assert refused.value.fix
