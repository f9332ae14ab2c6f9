"""Layers in one tree: what is new in it, whose files it has, and that a write into a layer is refused."""

import os
from pathlib import Path

import pytest
from helpers.errors import error_of

from envbuild.core.errors import CheckRefusedError
from envbuild.image.layers import assembly
from envbuild.image.layers.assembly import Assembly


def write(tree: Path, **files: str) -> Path:
    """Files by their names, with two underscores for a slash; ``pyc`` stands for ``__pycache__``."""
    for name, text in files.items():
        path = tree / name.replace("__", "/").replace("pyc/", "__pycache__/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree


@pytest.fixture
def low(tmp_path):
    return write(tmp_path / "store/low/rootfs", a__one="1", a__two="2")


@pytest.fixture
def joined(low, tmp_path):
    found = Assembly(tmp_path / "tree", may_differ=lambda path: path.startswith("tests/"))
    found.add("low", low)
    return found


def replace(path: Path, text: str) -> None:
    """As uv does it: a new file in the place of the old."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def test_added_is_what_is_new_and_what_was_replaced(joined, low):
    write(joined.tree, b__new="x")
    replace(joined.tree / "a/two", "2")
    (joined.tree / "b/link").symlink_to("../a/one")
    assert joined.added() == ["a/two", "b/link", "b/new"]
    assert (low / "a/two").read_text() == "2"


def test_files_of_an_added_layer_are_not_new(joined, tmp_path):
    write(joined.tree, b__new="x")
    os.makedirs(tmp_path / "high/b")
    os.link(joined.tree / "b/new", tmp_path / "high/b/new")
    write(tmp_path / "high", b__pyc__new="bytecode")
    joined.add("high", tmp_path / "high")
    assert joined.added() == []


def test_where_the_disk_has_no_links_files_are_copied(low, tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(assembly.os, "link", refuse)
    joined = Assembly(tmp_path / "tree")
    joined.add("low", low)
    assert (joined.tree / "a/one").read_text() == "1"
    assert joined.added() == []


def test_writing_into_a_file_of_a_layer_is_refused(joined):
    with (joined.tree / "a/one").open("a") as stream:
        stream.write("more")
    error = error_of(CheckRefusedError, joined.added)
    assert "changed layer low" in error.what
    assert error.why.startswith("a/one was written into")


def test_the_entry_to_remove_is_named(joined, tmp_path):
    (joined.tree / "a/one").unlink()
    error = error_of(CheckRefusedError, joined.added)
    assert error.why.startswith("a/one was removed")
    assert f"remove {tmp_path}/store/low and {tmp_path}/uv," in error.fix


def test_equal_files_of_two_layers_do_not_conflict(joined, tmp_path):
    joined.add("high", write(tmp_path / "high", a__one="1", a__three="3"))
    assert sorted(path.name for path in (joined.tree / "a").iterdir()) == ["one", "three", "two"]


@pytest.mark.parametrize("change", ["content", "mode", "kind"])
def test_another_file_of_the_same_name_is_refused(joined, tmp_path, change):
    high = write(tmp_path / "high", a__one="1")
    if change == "content":
        (high / "a/one").write_text("7")
    elif change == "mode":
        (high / "a/one").chmod(0o755)
    else:
        (high / "a/one").unlink()
        (high / "a/one").symlink_to("two")
    error = error_of(CheckRefusedError, joined.add, "high", high)
    assert "a/one" in error.what
    assert "Layer low has one and layer high another" in error.why


def test_other_bytecode_and_files_that_may_differ_are_the_uppermost(joined, tmp_path):
    joined.add("next", write(tmp_path / "next", tests__a="1", tests__pyc__b="1"))
    joined.add("high", write(tmp_path / "high", tests__a="2", tests__pyc__b="2"))
    assert (joined.tree / "tests/a").read_text() == "2"
    assert (joined.tree / "tests/__pycache__/b").read_text() == "2"
    assert (tmp_path / "next/tests/a").read_text() == "1"
    assert joined.added() == []
