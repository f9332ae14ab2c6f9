"""Unit tests: no network, no daemon, no root, seconds for all of them."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, nothing kept between runs, and no clock on a busy machine.
settings.register_profile("unit", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _loopback_without_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def open_dir():
    """A directory that a process without root can reach; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)
