"""Variables of uv that would change a lock, or what is installed, do not reach it; those about places do."""

import os

import pytest

from envbuild.lock.uv.settings import installing_uv, resolving_uv

# uv 0.13.8: `uv lock --help`, `uv pip install --help`.
DECIDING = [
    "UV_BUILD_CONSTRAINT", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_EXCLUDE_NEWER", "UV_FORK_STRATEGY", "UV_FROZEN",
    "UV_ISOLATED", "UV_LOCKED", "UV_NO_BINARY", "UV_NO_BINARY_PACKAGE", "UV_NO_BUILD", "UV_NO_BUILD_ISOLATION",
    "UV_NO_BUILD_PACKAGE", "UV_NO_SOURCES", "UV_NO_SOURCES_PACKAGE", "UV_OVERRIDE", "UV_PRERELEASE", "UV_PROJECT",
    "UV_PYTHON", "UV_RESOLUTION", "UV_TORCH_BACKEND", "UV_UPGRADE", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY",
]  # fmt: skip
INSTALLING = ["UV_NO_VERIFY_HASHES", "UV_REQUIRE_HASHES", "UV_SYSTEM_PYTHON"]
PLACES = ["UV_DEFAULT_INDEX", "UV_INDEX", "UV_CACHE_DIR", "UV_FIND_LINKS", "UV_NATIVE_TLS", "UV_PYTHON_INSTALL_MIRROR"]


@pytest.mark.parametrize("name", [*DECIDING, *INSTALLING, *PLACES])
def test_a_variable_reaches_uv_only_if_it_is_about_places(tmp_path, monkeypatch, name):
    for variable in [key for key in os.environ if key.startswith("UV_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setenv(name, "1")
    with resolving_uv() as resolving, installing_uv() as installing:
        assert (name in resolving) is (name not in DECIDING)
        assert (name in installing) is (name in PLACES)
