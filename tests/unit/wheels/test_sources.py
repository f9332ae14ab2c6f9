"""The sdists of a lock: from the store where it has them, and never another file than the one locked."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from helpers.locks import resolved_package
from helpers.simple_index import make_sdist
from unit.wheels.test_key import PARTS

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.git.checkout import _add
from envbuild.lock.components.downloads import FILE
from envbuild.store.local import LocalStore
from envbuild.wheels import sources as module
from envbuild.wheels.sources import SourceOrigin, WheelSources, version_variables


@pytest.fixture
def sources(tmp_path) -> WheelSources:
    reporter = SilentReporter()
    store = LocalStore(tmp_path / "store", reporter)
    return WheelSources(base=None, site=None, store=store, reporter=reporter)  # type: ignore[arg-type]


def sdist(tmp_path, pyproject: str | None = None) -> bytes:
    return make_sdist(tmp_path, "k", "1.0", pyproject=pyproject).read_bytes()


def put(sources: WheelSources, content: bytes) -> str:
    digest = sha256_bytes(content)
    sources.store.get_or_build("files", digest, lambda entry: (entry / FILE).write_bytes(content) and None)
    return digest


def test_sdist_in_the_store_is_not_looked_up(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(module.PackageIndex, "find", lambda *given: pytest.fail("it is in the store"))
    content = sdist(tmp_path, '[build-system]\nrequires = ["ninja", "torch"]\n')
    digest = put(sources, content)
    assert sources.sdist("k", "1.0", digest) == content
    assert sources.build_requires(SourceOrigin(package="k", version="1.0", sdist=digest)) == ("ninja", "torch")


def test_of_a_folder_of_a_repository_its_own_pyproject_counts(sources, tmp_path, monkeypatch):
    inner = {"python/pyproject.toml": '[build-system]\nrequires = ["ninja"]\n', "python/deep/pyproject.toml": "x"}
    archive = make_sdist(tmp_path, "k", "1.0", pyproject='[build-system]\nrequires = ["top"]\n', files=inner)
    monkeypatch.setattr(module, "archive_of_commit", lambda *given: archive.read_bytes())
    top = SourceOrigin(package="k", version="1.0", git="https://x/k", commit="1" * 40)
    inside = SourceOrigin(package="k", version="1.0", git="https://x/k", commit="1" * 40, subdirectory="python")
    assert sources.build_requires(top) == ("top",)
    assert sources.build_requires(inside) == ("ninja",)
    parts = PARTS.model_copy(update={"package": "k", "sdist": "", "commit": "1" * 40, "subdirectory": "python"})
    assert (inside.is_of(parts), top.is_of(parts)) == (True, False)


def test_a_pyproject_that_cannot_be_read_is_explained(sources, tmp_path):
    digest = put(sources, sdist(tmp_path, "[build-system\n"))
    with pytest.raises(CheckRefusedError, match="cannot be built") as refused:
        sources.build_requires(SourceOrigin(package="k", version="1.0", sdist=digest))
    assert "pyproject.toml cannot be read" in refused.value.why


def test_another_file_of_that_version_is_refused(sources, monkeypatch):
    releases = {"k": resolved_package({"name": "k", "version": "1.0", "sdist": {"hash": "sha256:other"}})}
    monkeypatch.setattr(module.PackageIndex, "find", lambda *given: releases)
    with pytest.raises(CheckRefusedError, match="not the one that was locked") as refused:
        sources.sdist("k", "1.0", "sha256:locked")
    assert refused.value.why == "Locked sha256:locked, the index has sha256:other."


def test_downloaded_sdist_is_compared_where_the_index_has_no_hash(sources, monkeypatch):
    releases = {"k": resolved_package({"name": "k", "version": "1.0", "sdist": {}})}
    monkeypatch.setattr(module.PackageIndex, "find", lambda *given: releases)
    monkeypatch.setattr(module, "fetch_sdist", lambda *given: (b"came", sha256_bytes(b"came")))
    with pytest.raises(CheckRefusedError, match="not the one that was locked"):
        sources.sdist("k", "1.0", "sha256:locked")
    assert sources.sdist("k", "1.0", sha256_bytes(b"came")) == b"came"


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
