"""Site settings: a file, environment variables that win over it, and what pip and uv were told already."""

from pathlib import Path

import pytest

from envbuild.catalog.site import CA_FILES, PUBLIC_TORCH_INDEX, load_site
from envbuild.core.errors import ConfigurationError


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """An environment of a user without any settings; pip's own files of this machine are left out."""
    return {"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}


def configure(home: dict[str, str], text: str) -> Path:
    path = Path(home["HOME"]) / ".config" / "envbuild" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults(home):
    site = load_site(home)
    assert site.cache_dir == Path(home["HOME"]) / ".cache" / "envbuild"
    assert site.find_links == ()
    assert site.torch_index == PUBLIC_TORCH_INDEX
    assert site.apt_mirror is None
    assert site.ca_bundle is None or str(site.ca_bundle) in CA_FILES


FILE = """\
cache_dir = "~/from-file"
apt_mirror = "http://file.example/debian"
[torch_builds]
find_links = ["/file/wheels"]
index = "http://file.example/{build}"
"""


def test_file(home):
    configure(home, FILE)
    site = load_site(home)
    assert site.cache_dir == Path("~/from-file").expanduser()
    assert site.apt_mirror == "http://file.example/debian"
    assert site.find_links == ("/file/wheels",)
    assert site.torch_index == "http://file.example/{build}"


def test_environment_wins_over_the_file(home):
    configure(home, FILE)
    site = load_site(
        {
            **home,
            "ENVBUILD_CACHE_DIR": "/from-env",
            "ENVBUILD_APT_MIRROR": "http://env.example/debian",
            "ENVBUILD_TORCH_INDEX": "http://env.example/cpu",
        }
    )
    assert site.cache_dir == Path("/from-env")
    assert site.apt_mirror == "http://env.example/debian"
    assert site.torch_index == "http://env.example/cpu"


def test_xdg_folders(home, tmp_path):
    (tmp_path / "xdg" / "envbuild").mkdir(parents=True)
    (tmp_path / "xdg" / "envbuild" / "config.toml").write_text('apt_mirror = "http://xdg.example"\n')
    site = load_site({**home, "XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert site.apt_mirror == "http://xdg.example"
    assert site.cache_dir == tmp_path / "cache" / "envbuild"


def test_cache_dir_is_absolute(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_site({**home, "ENVBUILD_CACHE_DIR": "cache"}).cache_dir == tmp_path / "cache"


def test_find_links_in_order_of_file_uv_pip_and_pips_file(home, tmp_path):
    configure(home, FILE)
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nfind-links = /conf/a\n    https://conf.example/b%20c\n[install]\nfind-links = /conf/c\n")
    site = load_site(
        {
            **home,
            "UV_FIND_LINKS": "/uv/a,/uv/b",
            "PIP_FIND_LINKS": "/pip/a  /uv/a https://pip.example/",
            "PIP_CONFIG_FILE": str(pip),
        }
    )
    assert site.find_links == (
        *("/file/wheels", "/uv/a", "/uv/b", "/pip/a", "https://pip.example/"),
        *("/conf/a", "https://conf.example/b%20c", "/conf/c"),
    )


@pytest.mark.parametrize("content", [b"no section\n", b"[global]\nfind-links = \xff\n", b"[global\n", b"\x00"])
def test_broken_pip_configuration_is_left_to_pip(home, tmp_path, content):
    (tmp_path / "pip.conf").write_bytes(content)
    assert load_site({**home, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/a"}).find_links == (
        "/a",
    )


def test_named_configuration_file(home, tmp_path):
    configure(home, "cache_dir = 1  # not read")
    (tmp_path / "other.toml").write_text('apt_mirror = "http://other.example"\n')
    assert load_site({**home, "ENVBUILD_CONFIG": str(tmp_path / "other.toml")}).apt_mirror == "http://other.example"


def test_named_configuration_file_that_is_missing(home, tmp_path):
    with pytest.raises(ConfigurationError, match="does not exist") as caught:
        load_site({**home, "ENVBUILD_CONFIG": str(tmp_path / "missing.toml")})
    assert "ENVBUILD_CONFIG" in caught.value.why


def test_wrong_configuration_file_names_the_key(home):
    path = configure(home, "cache-dir = 1\n")
    with pytest.raises(ConfigurationError) as caught:
        load_site(home)
    assert caught.value.what.startswith(f"{path}:1:")
    assert "did you mean 'cache_dir'" in caught.value.why


@pytest.mark.parametrize("setting", ["file", "SSL_CERT_FILE", "PIP_CERT"])
@pytest.mark.parametrize("exists", [True, False])
def test_ca_bundle(home, tmp_path, setting, exists):
    bundle = tmp_path / "ca.pem"
    if exists:
        bundle.write_text("")
    if setting == "file":
        configure(home, f'ca_bundle = "{bundle}"\n')
    else:
        home[setting] = str(bundle)
    if exists:
        assert load_site(home).ca_bundle == bundle
    else:
        with pytest.raises(ConfigurationError, match=r"CA bundle .* does not exist"):
            load_site(home)
