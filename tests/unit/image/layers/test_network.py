"""What of this machine reaches a step with network access: its way out, and no more."""

import pytest
from helpers.sites import site_of

from envbuild.image.layers.network import access
from envbuild.lock.uv.torch_builds import TorchSource

PACKAGE_INDEX = TorchSource("package-index", None)


def of(environ=None, source=PACKAGE_INDEX, **values):
    return access(site_of(**values), source, "/run/x", {"HOME": "/nonexistent", **(environ or {})})


def places(found):
    return {bind.target: bind.source for bind in found.binds}


def test_access_passes_proxies_and_uvs_way_to_an_index():
    environ = {
        "https_proxy": "http://u:p@proxy:1",
        "NO_PROXY": "localhost",
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX_CORP_PASSWORD": "secret",
        "UV_HTTP_TIMEOUT": "90",
    }
    assert of(environ).environment == environ


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH", "PYTHONPATH", "LD_PRELOAD", "HOME", "PIP_INDEX_URL"),
        *("UV_CACHE_DIR", "UV_LINK_MODE", "UV_PROJECT_ENVIRONMENT", "UV_EXCLUDE_NEWER", "UV_CONSTRAINT", "UV_PYTHON"),
    ],
)
def test_access_passes_nothing_else(name):
    assert name not in of({name: "value"}).environment


@pytest.mark.parametrize(
    ("file", "environ", "more", "variable", "target"),
    [
        ("ca.pem", {}, {"ca_bundle": "ca.pem"}, "SSL_CERT_FILE", "/run/x/ca.pem"),
        (".netrc", {}, {}, "NETRC", "/run/x/netrc"),
        (".config/uv/uv.toml", {}, {}, "XDG_CONFIG_HOME", "/run/x/user/uv/uv.toml"),
        ("mine.toml", {"UV_CONFIG_FILE": "mine.toml"}, {}, "UV_CONFIG_FILE", "/run/x/uv.toml"),
    ],
)
def test_access_binds_files_and_names_their_places(tmp_path, file, environ, more, variable, target):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("x")
    variables = {"HOME": str(tmp_path), **{name: str(tmp_path / value) for name, value in environ.items()}}
    found = of(variables, **{name: tmp_path / value for name, value in more.items()})
    assert target.startswith(found.environment[variable])
    assert places(found)[target] == tmp_path / file


def test_access_binds_local_indexes_and_rewrites_their_addresses(tmp_path):
    found = of({"UV_INDEX": f"https://h/simple file://{tmp_path}/simple"})
    _, local = found.environment["UV_INDEX"].split(" ")
    assert places(found)[local.removeprefix("file://")] == tmp_path / "simple"
    assert local.startswith("file:///run/x/local/")


def test_access_binds_the_configuration_that_was_named_instead(tmp_path):
    (tmp_path / ".config/uv").mkdir(parents=True)
    (tmp_path / ".config/uv/uv.toml").write_text("")
    (tmp_path / "mine.toml").write_text("")
    found = of({"HOME": str(tmp_path), "UV_CONFIG_FILE": str(tmp_path / "mine.toml")})
    assert found.environment["UV_CONFIG_FILE"] == "/run/x/uv.toml"
    assert "/run/x/user/uv/uv.toml" not in places(found)


def test_access_never_binds_anything_writable(tmp_path):
    found = of({"UV_INDEX": f"file://{tmp_path}"}, source=TorchSource("find-links", str(tmp_path)))
    assert not any(bind.writable for bind in found.binds)
