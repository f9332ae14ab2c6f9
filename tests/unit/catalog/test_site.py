"""Site settings: a file, environment variables that win over it, and what pip and uv were told already."""

import json
import os
import pwd
from pathlib import Path

import pytest

from envbuild.catalog import site as site_module
from envbuild.catalog.site import CA_FILES, PUBLIC_TORCH_INDEX, load_site
from envbuild.core.errors import ConfigurationError


@pytest.fixture
def home(tmp_path, monkeypatch) -> dict[str, str]:
    """An environment of a user without any settings; pip's own files of this machine are left out."""
    monkeypatch.setattr(site_module, "PIP_CONFIG_OF_ALL", tmp_path / "none")
    return {"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null", "XDG_CONFIG_DIRS": str(tmp_path / "none")}


def configure(home: dict[str, str], text: str) -> Path:
    path = Path(home["HOME"]) / ".config" / "envbuild" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults(home):
    site = load_site(home)
    assert site.cache_dir == Path(home["HOME"]) / ".cache" / "envbuild"
    assert site.state_dir == Path(home["HOME"]) / ".local/state/envbuild"
    assert site.find_links == ()
    assert site.torch_index == PUBLIC_TORCH_INDEX
    assert site.apt_mirror is None
    assert site.ca_bundle is None or str(site.ca_bundle) in CA_FILES


FILE = """\
cache_dir = "~/from-file"
state_dir = "~/state"
apt_mirror = "http://file.example/debian"
[torch_builds]
find_links = ["/file/wheels"]
index = "http://file.example/{build}"
"""


def test_file(home):
    configure(home, FILE)
    site = load_site(home)
    assert site.cache_dir == Path(home["HOME"]) / "from-file"
    assert site.state_dir == Path(home["HOME"]) / "state"
    assert site.apt_mirror == "http://file.example/debian"
    assert site.find_links == ("/file/wheels",)
    assert site.torch_index == "http://file.example/{build}"


def test_environment_wins_over_the_file(home):
    configure(home, FILE)
    site = load_site(
        {
            **home,
            "ENVBUILD_CACHE_DIR": "/from-env",
            "ENVBUILD_STATE_DIR": "/state-from-env",
            "ENVBUILD_APT_MIRROR": "http://env.example/debian",
            "ENVBUILD_TORCH_INDEX": "http://env.example/cpu",
        }
    )
    assert site.cache_dir == Path("/from-env")
    assert site.state_dir == Path("/state-from-env")
    assert site.apt_mirror == "http://env.example/debian"
    assert site.torch_index == "http://env.example/cpu"


def test_xdg_folders(home, tmp_path):
    (tmp_path / "xdg" / "envbuild").mkdir(parents=True)
    (tmp_path / "xdg" / "envbuild" / "config.toml").write_text('apt_mirror = "http://xdg.example"\n')
    variables = {"CONFIG": "xdg", "CACHE": "cache", "STATE": "state"}
    site = load_site({**home, **{f"XDG_{name}_HOME": str(tmp_path / folder) for name, folder in variables.items()}})
    assert site.apt_mirror == "http://xdg.example"
    assert site.cache_dir == tmp_path / "cache" / "envbuild"
    assert site.state_dir == tmp_path / "state" / "envbuild"


@pytest.mark.parametrize("value", ["", "rel", "./rel", None])
def test_home_that_is_not_absolute_is_taken_from_the_password_database(value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    environ = {"PIP_CONFIG_FILE": "/dev/null", **({} if value is None else {"HOME": value})}
    entry = pwd.getpwuid(os.getuid())
    assert load_site(environ).cache_dir == Path(entry.pw_dir) / ".cache" / "envbuild"
    file = tmp_path / "config.toml"
    file.write_text('cache_dir = "~/here"\n')
    assert load_site({**environ, "ENVBUILD_CONFIG": str(file)}).cache_dir == Path(entry.pw_dir) / "here"


def test_account_without_a_home_is_refused(monkeypatch):
    def unknown(_):
        raise KeyError

    monkeypatch.setattr(site_module.pwd, "getpwuid", unknown)
    with pytest.raises(ConfigurationError, match="no home directory") as caught:
        load_site({"PIP_CONFIG_FILE": "/dev/null", "HOME": ""})
    assert "Set HOME" in caught.value.fix


@pytest.mark.parametrize("value", ["", "rel", "../rel"])
def test_xdg_folder_that_is_not_absolute_is_ignored(home, tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    configure({"HOME": str(tmp_path)}, 'apt_mirror = "http://home.example/debian"\n')
    for folder in ("rel", "envbuild"):
        (tmp_path / folder / "envbuild").mkdir(parents=True)
        (tmp_path / folder / "envbuild" / "config.toml").write_text("not read")
    site = load_site({**home, "XDG_CONFIG_HOME": value, "XDG_CACHE_HOME": value})
    assert site.apt_mirror == "http://home.example/debian"
    assert site.cache_dir == tmp_path / ".cache" / "envbuild"


MIRRORS = [
    "http://mirror.example/debian", "https://user:pass@mirror.example:8080/debian/", "file:/srv/debian",
    "copy:///srv/debian", "deb http://mirror.example/debian bookworm main",
    "deb [signed-by=/a/key.gpg arch=amd64] http://mirror.example/debian bookworm main contrib",
    "deb http://mirror.example/debian ./", "deb http://m.example/a b c\n# a comment\n\ndeb http://m.example/a b-u c",
]  # fmt: skip
NO_MIRRORS = [
    "bla", "mirror.example/debian", "http://", "http:///debian", "ftp//x", "http://mirror.example/debian bookworm",
    "deb http://mirror.example/debian", "deb bookworm main", "debian http://x y z", "javascript:1",
    "mirror.example:8080/debian", "# a comment", "# a comment\ndeb http://m.example/a b c",
    "deb http://m.example/a b c\nhttp://m.example/a", "http://m.example/a\nhttp://m.example/b",
]  # fmt: skip


@pytest.mark.parametrize("mirror", MIRRORS)
def test_apt_mirror(home, mirror):
    assert load_site({**home, "ENVBUILD_APT_MIRROR": mirror}).apt_mirror == mirror


@pytest.mark.parametrize("mirror", ["", " ", "\n"])
def test_empty_apt_mirror_is_none(home, mirror):
    assert load_site({**home, "ENVBUILD_APT_MIRROR": mirror}).apt_mirror is None


@pytest.mark.parametrize("mirror", NO_MIRRORS)
@pytest.mark.parametrize("setting", ["ENVBUILD_APT_MIRROR", "apt_mirror"])
def test_wrong_apt_mirror_is_refused(home, mirror, setting):
    if setting == "apt_mirror":
        configure(home, f"apt_mirror = {json.dumps(mirror)}\n")
    else:
        home = {**home, setting: mirror}
    with pytest.raises(ConfigurationError, match="is not a mirror") as caught:
        load_site(home)
    assert caught.value.what.startswith(setting)


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


@pytest.mark.parametrize(
    ("named", "places"),
    [
        (None, ("/xdg", "/etc", "/user", "/old")),
        ("named.conf", ("/xdg", "/etc", "/named")),
        ("gone.conf", ("/xdg", "/etc", "/user", "/old")),
        (os.devnull, ()),
    ],
)
def test_files_of_pip_are_those_that_pip_reads(tmp_path, monkeypatch, named, places):
    files = {"xdg": "dirs/pip/pip.conf", "etc": "etc.conf", "user": "config/pip/pip.conf", "old": ".pip/pip.conf"}
    for place, file in {**files, "named": "named.conf"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"[global]\nfind-links = /{place}\n")
    monkeypatch.setattr(site_module, "PIP_CONFIG_OF_ALL", tmp_path / "etc.conf")
    folders = {"HOME": tmp_path, "XDG_CONFIG_DIRS": tmp_path / "dirs", "XDG_CONFIG_HOME": tmp_path / "config"}
    environ = {name: str(folder) for name, folder in folders.items()}
    if named:
        environ["PIP_CONFIG_FILE"] = str(tmp_path / named)
    assert load_site(environ).find_links == places


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


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_configuration_that_is_no_file_is_not_passed_over(home, kind):
    path = configure(home, "")
    path.unlink()
    path.mkdir() if kind == "folder" else path.symlink_to("elsewhere.toml")
    with pytest.raises(ConfigurationError, match=r"the configuration file .*config\.toml") as caught:
        load_site(home)
    assert ("It is a directory" if kind == "folder" else "symbolic link to elsewhere.toml") in caught.value.why
    assert "The settings of this account are looked for there." in caught.value.why
    assert caught.value.fix == "Put the settings there as a file, or remove it."


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


@pytest.mark.parametrize(
    ("variable", "refused"),
    [("Site=https://b/simple", True), ("s.ite=https://b/simple", False), ("SITE=https://a/simple/", False)],
)
def test_names_of_indexes_that_share_a_password(tmp_path, variable, refused):
    file = tmp_path / "c.toml"
    file.write_text('[indexes]\nsite = "https://a/simple"\n')
    environ = {"ENVBUILD_CONFIG": str(file), "HOME": str(tmp_path), "UV_INDEX": variable}
    if not refused:
        assert len(load_site(environ).indexes) == 2
        return
    with pytest.raises(ConfigurationError, match="same variables for their passwords") as error:
        load_site(environ)
    assert "UV_INDEX_SITE_PASSWORD" in error.value.why
