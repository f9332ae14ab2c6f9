"""The smoke runner's bytes depend on its sources alone."""

import os
import shutil
import subprocess
import sys

import pytest

from envbuild.catalog.data import data_root
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore
from envbuild.sync.zipapp import FILE_NAME, smoke_bytes, smoke_file


@pytest.fixture
def copy(tmp_path):
    def make(name: str):
        return shutil.copytree(
            data_root() / "smoke",
            tmp_path / name,
            copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns("__pycache__"),
        )

    return make


def test_same_bytes_from_copies_with_other_times_modes_and_caches(copy):
    one, other = copy("one"), copy("other")
    for path in sorted(other.rglob("*"), reverse=True):
        if path.is_file():
            os.utime(path, (1, 1))
            path.chmod(0o600)
    (other / "envbuild_smoke" / "__pycache__").mkdir()
    (other / "envbuild_smoke" / "__pycache__" / "x.py").write_text("")
    (other / "notes.txt").write_text("not shipped")
    assert smoke_bytes(one) == smoke_bytes(other) == smoke_bytes()


def test_smoke_file_is_in_the_store_once_and_runs(tmp_path):
    store = LocalStore(tmp_path / "store", SilentReporter())
    path, digest = smoke_file(store)
    assert (path, digest) == smoke_file(store)
    assert path.name == FILE_NAME
    assert digest == sha256_file(path) == sha256_bytes(smoke_bytes())
    shown = subprocess.run([sys.executable, "-S", "-I", path, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout.lower()
