"""Metadata of distributions: conflicts of their files, changed rows, and their origin."""

import json
import os

import pytest
from helpers.errors import error_of
from helpers.wheels import record_digest

from envbuild.core.errors import CheckRefusedError
from envbuild.image.layers.dist_info import (
    check_against,
    conflicts,
    distributions,
    from_commit,
    infos,
    remove_leftovers,
    rows,
)


@pytest.fixture
def info(tmp_path):
    folder = tmp_path / "site-packages/My_Tool-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "RECORD").write_text(
        'my/__init__.py,sha256=a,1\n"odd,name.py",sha256=b,2\n../../../bin/my,sha256=c,3\n'
        "My_Tool-1.0.dist-info/direct_url.json,sha256=d,9\nMy_Tool-1.0.dist-info/RECORD,,\n"
    )
    (folder / "direct_url.json").write_text('{"url": "file:///run/x", "dir_info": {}}')
    return folder


def test_infos_are_found_by_canonical_name(info):
    assert infos(info.parent, {"my-tool", "other"}) == {"my-tool": info}
    assert infos(info.parent, {"other"}) == {}


def test_conflicts_are_files_of_several_with_different_hashes():
    listed = {
        "b": [("x.py", "1"), ("same.py", "1"), ("y.py", "1")],
        "a": [("x.py", "2"), ("same.py", "1")],
        "c": [("x.py", "1")],
    }
    assert list(conflicts(listed)) == [("x.py", ["a", "b", "c"])]


def test_from_commit_records_the_origin_and_leaves_the_cache_unchanged(info, tmp_path):
    for name in ("RECORD", "direct_url.json"):
        os.link(info / name, tmp_path / name)
    from_commit(info, "https://x/my.git", "abc", "sub")
    data = (info / "direct_url.json").read_bytes()
    assert json.loads(data) == {
        "url": "https://x/my.git",
        "vcs_info": {"vcs": "git", "requested_revision": "abc", "commit_id": "abc"},
        "subdirectory": "sub",
    }
    row = ("My_Tool-1.0.dist-info/direct_url.json", record_digest(data))
    assert row in rows(info)
    assert len(rows(info)) == 5
    assert "/run/x" in (tmp_path / "direct_url.json").read_text()
    assert "sha256=d" in (tmp_path / "RECORD").read_text()


@pytest.fixture
def venv(tmp_path):
    site_packages = tmp_path / "venv/lib/python3.11/site-packages"
    info = site_packages / "Some_Package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: Some.Package\nVersion: 1.0\n\nName: not this\n")
    (info / "uv_cache.json").write_text('{"timestamp": 1}')
    (info / "RECORD").write_text(
        'Some_Package-1.0.dist-info/RECORD,,\n"odd,name.py",sha256=x,3\nSome_Package-1.0.dist-info/uv_cache.json,h,9\n'
    )
    for name in (".lock", ".gitignore", "CACHEDIR.TAG", "pyvenv.cfg"):
        (tmp_path / "venv" / name).write_text("x")
    return tmp_path / "venv"


def packages_of(venv):
    return venv / "lib/python3.11/site-packages"


def test_tidy_removes_what_uv_keeps_for_itself_and_leaves_its_cache(venv, tmp_path):
    record = packages_of(venv) / "Some_Package-1.0.dist-info/RECORD"
    os.link(record, tmp_path / "cached")
    remove_leftovers(venv, packages_of(venv))
    assert sorted(path.name for path in venv.iterdir()) == ["lib", "pyvenv.cfg"]
    assert not list(packages_of(venv).rglob("uv_cache.json"))
    assert record.read_text() == 'Some_Package-1.0.dist-info/RECORD,,\n"odd,name.py",sha256=x,3\n'
    assert "uv_cache.json" in (tmp_path / "cached").read_text()


def test_distributions_are_named_canonically(venv):
    assert distributions(packages_of(venv)) == {"some-package": "1.0"}


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"a": "1", "b": "3"}, "b: locked 2, installed 3"),
        ({"a": "1"}, "b: locked 2, installed not"),
        ({"a": "1", "b": "2", "c": "4"}, "c: locked not, installed 4"),
    ],
)
def test_check_against_names_each_difference(installed, message):
    assert error_of(CheckRefusedError, check_against, {"a": "1", "b": "2"}, installed).why == message


@pytest.mark.parametrize(
    ("url", "stays"),
    [
        ("file:///run/envbuild/built/0f3a/some_package-1.0-py3-none-any.whl", False),
        ("https://git.example.com/some/package", True),
    ],
)
def test_tidy_forgets_where_the_builder_saw_a_wheel_and_keeps_a_real_origin(venv, url, stays):
    info = packages_of(venv) / "Some_Package-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))
    with (info / "RECORD").open("a") as stream:
        stream.write("Some_Package-1.0.dist-info/direct_url.json,sha256=x,9\n")
    remove_leftovers(venv, packages_of(venv))
    assert (info / "direct_url.json").exists() == stays
    assert ("direct_url.json" in (info / "RECORD").read_text()) == stays
