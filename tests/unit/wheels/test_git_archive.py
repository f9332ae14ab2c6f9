"""The archive of a commit: the same bytes from every checkout."""

import io
import os
import tarfile
from pathlib import Path

from envbuild.wheels.sources import _add, version_variables


def archive(folder: Path, moment: int) -> bytes:
    """The archive of a checkout whose files have this time."""
    for name in ("b.py", "a/c.sh", ".git/HEAD", "third/.git"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "a/link").symlink_to("c.sh")
    os.link(folder / "b.py", folder / "same.py")
    os.utime(folder / "b.py", (moment, moment))
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, folder, "k-1", 1700000000)
    return made.getvalue()


def test_archive_is_of_the_commit_alone(tmp_path):
    content = archive(tmp_path / "one", 1)
    assert archive(tmp_path / "other", 2) == content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = ["k-1/a", "k-1/a/c.sh", "k-1/a/link", "k-1/b.py", "k-1/same.py", "k-1/third"]
        assert tar.getnames() == names
        owners = {(item.mtime, item.uid, item.gid, item.uname, item.gname) for item in tar}
        assert owners == {(1700000000, 0, 0, "", "")}
        same = tar.extractfile("k-1/same.py")
        assert same is not None
        assert same.read() == b"b.py"


def test_sources_without_a_history_are_told_their_version(tmp_path):
    project = tmp_path / "pyproject.toml"
    expected = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_A_B": "1.2"}
    assert version_variables("a-b", "1.2", tmp_path) == expected
    project.write_text('[build-system]\nrequires = ["setuptools"]\n')
    assert version_variables("a-b", "1.2", tmp_path) == expected
    project.write_text('[build-system]\nrequires = ["poetry-core", "poetry-dynamic-versioning>=1"]\n')
    assert version_variables("a-b", "1.2", tmp_path) == expected | {"POETRY_DYNAMIC_VERSIONING_BYPASS": "1.2"}
