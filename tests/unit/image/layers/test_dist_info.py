"""What distributions say of their files: conflicts, rows that are changed, and where they are from."""

import hashlib
import json
import os
from base64 import urlsafe_b64encode

import pytest

from envbuild.image.layers.dist_info import conflicts, from_commit, infos, rows


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


def test_rows_are_paths_and_hashes(info):
    assert rows(info)[:3] == [
        ("my/__init__.py", "a"),
        ("odd,name.py", "b"),
        ("../../../bin/my", "c"),
    ]


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


def test_from_commit_says_where_it_is_from_and_leaves_the_cache_alone(info, tmp_path):
    for name in ("RECORD", "direct_url.json"):
        os.link(info / name, tmp_path / name)
    from_commit(info, "https://x/my.git", "abc", "sub")
    data = (info / "direct_url.json").read_bytes()
    assert json.loads(data) == {
        "url": "https://x/my.git",
        "vcs_info": {"vcs": "git", "requested_revision": "abc", "commit_id": "abc"},
        "subdirectory": "sub",
    }
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    row = ("My_Tool-1.0.dist-info/direct_url.json", digest)
    assert row in rows(info)
    assert len(rows(info)) == 5
    assert "/run/x" in (tmp_path / "direct_url.json").read_text()
    assert "sha256=d" in (tmp_path / "RECORD").read_text()
