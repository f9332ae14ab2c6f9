"""Bytecode: the same bytes from any number of processes, never checked against a file's time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root

SCRIPT = data_root() / "containers/native/compile_tree.py"
UNCHECKED = (1).to_bytes(4, "little")  # PEP 552: hash-based, not checked
PACKAGES = ("json", "email")


@pytest.fixture
def tree(tmp_path):
    library = Path(os.__file__).parent
    for name in PACKAGES:
        shutil.copytree(library / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tree"


def compile_tree(tree: Path, processes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-s", SCRIPT, tree, str(processes)],
        env={"PYTHONHASHSEED": "0"},
        check=True,
        capture_output=True,
        text=True,
    )


def compiled(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*.pyc")}


def test_bytecode_does_not_depend_on_the_number_of_processes(tree):
    compile_tree(tree, 1)
    alone = compiled(tree)
    for folder in list(tree.rglob("__pycache__")):
        shutil.rmtree(folder)
    compile_tree(tree, 7)
    assert compiled(tree) == alone
    assert len(alone) == len(list(tree.rglob("*.py")))


def test_bytecode_of_a_folder_does_not_depend_on_other_folders(tree):
    compile_tree(tree, 2)
    before = compiled(tree / "email")
    shutil.rmtree(tree / "json")
    for folder in list(tree.rglob("__pycache__")):
        shutil.rmtree(folder)
    compile_tree(tree, 2)
    assert compiled(tree / "email") == before


def test_bytecode_is_not_checked_against_times_and_names_its_source(tree):
    compile_tree(tree, 2)
    assert {data[4:8] for data in compiled(tree).values()} == {UNCHECKED}
    assert str(tree / "json/decoder.py").encode() in next((tree / "json/__pycache__").glob("decoder.*")).read_bytes()


def test_invalid_python_sources_are_printed_and_skipped(tree):
    (tree / "json/template.py").write_text("def {{ name }}: pass\n")
    (tree / "json/nul.py").write_bytes(b"x = 1\0\n")
    (tree / "json/latin.py").write_bytes(b"x = '\xff'\n")
    output = compile_tree(tree, 2).stdout.split()
    assert sorted(Path(line).name for line in output) == ["latin.py", "nul.py", "template.py"]
    assert list((tree / "json/__pycache__").glob("decoder.*"))


def test_full_disk_is_a_failure(tree):
    folder = tree / "json/__pycache__"
    folder.mkdir()
    # py_compile refuses to write over what is no regular file: a stand-in for a write that fails.
    (folder / f"decoder.{sys.implementation.cache_tag}.pyc").symlink_to("/dev/full")
    with pytest.raises(subprocess.CalledProcessError):
        compile_tree(tree, 2)
