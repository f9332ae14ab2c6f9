"""What of this machine reaches a step with network access: its way out, and no more."""

from pathlib import Path

import pytest

from envbuild.catalog.site import Site
from envbuild.image.layers.network import access
from envbuild.lock.uv.torch_builds import TorchSource

PACKAGE_INDEX = TorchSource("package-index", None)


def site(**values) -> Site:
    return Site(
        **{
            "cache_dir": Path("/cache"),
            "ca_bundle": None,
            "apt_mirror": None,
            "find_links": (),
            "torch_index": "https://t/{build}",
            **values,
        }
    )


def of(environ=None, source=PACKAGE_INDEX, **values):
    return access(site(**values), source, "/run/x", {"HOME": "/nonexistent", **(environ or {})})


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


def test_access_binds_the_certificates(tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("x")
    found = of(ca_bundle=bundle)
    assert found.environment["SSL_CERT_FILE"] == "/run/x/ca.pem"
    assert places(found)["/run/x/ca.pem"] == bundle


def test_access_binds_a_local_folder_of_wheels(tmp_path):
    found = of(source=TorchSource("find-links", str(tmp_path)))
    assert found.uv_args == ("--find-links", "/run/x/wheels")
    assert places(found)["/run/x/wheels"] == tmp_path


def test_access_leaves_a_page_of_wheels_as_it_is():
    found = of(source=TorchSource("find-links", "https://host/wheels.html"))
    assert found.uv_args == ("--find-links", "https://host/wheels.html")
    assert "/run/x/wheels" not in places(found)


def test_access_binds_local_indexes_and_says_where_they_are(tmp_path):
    found = of({"UV_INDEX": f"https://h/simple file://{tmp_path}/simple"})
    _, local = found.environment["UV_INDEX"].split(" ")
    assert places(found)[local.removeprefix("file://")] == tmp_path / "simple"
    assert local.startswith("file:///run/x/local/")


def test_access_binds_a_netrc(tmp_path):
    (tmp_path / ".netrc").write_text("machine h login l password p")
    found = of({"HOME": str(tmp_path)})
    assert found.environment["NETRC"] == "/run/x/netrc"
    assert places(found)["/run/x/netrc"] == tmp_path / ".netrc"


def test_access_binds_uvs_configuration_where_uv_looks(tmp_path):
    (tmp_path / ".config/uv").mkdir(parents=True)
    (tmp_path / ".config/uv/uv.toml").write_text("")
    found = of({"HOME": str(tmp_path)})
    assert found.environment["XDG_CONFIG_HOME"] == "/run/x/user"
    assert places(found)["/run/x/user/uv/uv.toml"] == tmp_path / ".config/uv/uv.toml"


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
