"""Of the user's own settings of uv, only those about places reach it."""

import os
from pathlib import Path

import pytest

from envbuild.core import tomlread
from envbuild.lock.uv.settings import installing_uv, resolving_uv

ALLOWED = [
    "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_MINE_PASSWORD", "UV_CACHE_DIR", "UV_FIND_LINKS", "UV_NATIVE_TLS",
    "UV_HTTP_TIMEOUT", "UV_CONCURRENT_BUILDS", "UV_PYTHON_INSTALL_MIRROR", "UV_OFFLINE", "HTTPS_PROXY",
]  # fmt: skip
# A few of uv's own, and one that it may have later.
OTHERS = [
    "UV_INDEX_STRATEGY",
    "UV_EXCLUDE_NEWER",
    "UV_PYTHON",
    "UV_PROJECT",
    "UV_NO_VERIFY_HASHES",
    "UV_NEW",
    "RUST_LOG",
]


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [key for key in os.environ if key.startswith("UV_")]:
        monkeypatch.delenv(variable)
    for variable in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


@pytest.mark.parametrize("name", [*ALLOWED, *OTHERS])
def test_a_variable_reaches_uv_only_if_it_is_about_places(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with resolving_uv() as resolving, installing_uv() as installing:
        assert (name in resolving) is (name in installing) is (name in ALLOWED)


def test_keys_of_a_uv_toml_reach_uv_only_if_they_are_about_places(tmp_path):
    own, system = tmp_path / "XDG_CONFIG_HOME", tmp_path / "XDG_CONFIG_DIRS"
    for folder in (own, system):
        (folder / "uv").mkdir(parents=True)
    (own / "git").mkdir()
    index = 'index = [{url = "https://a/", name = "a", exclude-newer = "2020-01-01"}]\n'
    (own / "uv/uv.toml").write_text(f'index-strategy = "unsafe-best-match"\nnew = 1\nfind-links = ["wheels"]\n{index}')
    (system / "uv/uv.toml").write_text('find-links = ["/there"]\noffline = true\npip = {prerelease = "allow"}\n')
    with resolving_uv() as resolving, installing_uv() as installing:
        home = Path(resolving["XDG_CONFIG_HOME"])
        assert (home / "git").resolve() == own / "git"
        for file in (home / "uv/uv.toml", Path(installing["UV_CONFIG_FILE"])):
            assert tomlread.loads(file.read_text()) == {
                "find-links": [str(own / "uv/wheels"), "/there"],
                "index": [{"url": "https://a/", "name": "a"}],
                "offline": True,
                "pip": {},
            }
        assert Path(resolving["XDG_CONFIG_DIRS"], "uv/uv.toml").read_text() == ""
