"""Which password goes to which host."""

import base64
import urllib.request

import pytest

from envbuild.lock.uv.credentials import credentials, request_for


@pytest.mark.parametrize(
    ("environ", "actual"),
    [
        ({}, None),
        ({"UV_DEFAULT_INDEX": "https://me:a%40b@host/simple"}, ("me", "a@b")),
        ({"UV_DEFAULT_INDEX": "https://me:x@other/simple"}, None),
        ({"UV_DEFAULT_INDEX": "http://me:x@host/simple"}, None),
        ({"UV_DEFAULT_INDEX": "https://me:x@host:8443/simple"}, None),
        ({"UV_DEFAULT_INDEX": "https://token@host:443/simple"}, ("token", "")),
        ({"UV_INDEX_URL": "https://me:x@host/"}, ("me", "x")),
        ({"UV_INDEX": "https://other/ mine=https://me:x@host/simple"}, ("me", "x")),
        ({"UV_EXTRA_INDEX_URL": "https://other/ https://me:x@host/simple"}, ("me", "x")),
        ({"UV_FIND_LINKS": "/a,https://me:x@host/wheels"}, ("me", "x")),
        ({"UV_INDEX": "a.b=https://host/", "UV_INDEX_A_B_USERNAME": "u", "UV_INDEX_A_B_PASSWORD": "p"}, ("u", "p")),
        ({"UV_INDEX": "a=https://host/", "UV_INDEX_B_PASSWORD": "p"}, None),
        ({"UV_DEFAULT_INDEX": "https://me:x@[bad"}, None),
    ],
)
def test_from_variables(environ, actual, tmp_path):
    assert credentials("https://host/files/a.tar.gz", {"HOME": str(tmp_path), **environ}) == actual


def test_from_files(tmp_path):
    (tmp_path / ".netrc").write_text("machine host login n password p\n")
    (tmp_path / ".netrc").chmod(0o600)
    environ = {"HOME": str(tmp_path)}
    assert credentials("https://host/a", environ) == ("n", "p")
    assert credentials("https://other/a", environ) is None
    config = tmp_path / ".config/uv/uv.toml"
    config.parent.mkdir(parents=True)
    config.write_text('extra-index-url = ["https://me:x@host/simple"]\n')
    assert credentials("https://host/a", environ) == ("me", "x")
    assert credentials("https://host/a", {**environ, "UV_NO_CONFIG": "1"}) == ("n", "p")
    config.write_text("no TOML")
    (tmp_path / ".netrc").write_text("no netrc")
    assert credentials("https://host/a", environ) is None
    config.unlink()
    system = tmp_path / "system/uv/uv.toml"
    system.parent.mkdir(parents=True)
    system.write_text('index-url = "https://our:s@host/simple"\n')
    assert credentials("https://host/a", {**environ, "XDG_CONFIG_DIRS": str(tmp_path / "system")}) == ("our", "s")


def test_the_header_stays_with_the_host():
    request = request_for("https://me:a%40b@host/a?b=1", {})
    assert request.full_url == "https://host/a?b=1"
    assert request.unredirected_hdrs == {"Authorization": "Basic " + base64.b64encode(b"me:a@b").decode()}
    redirect = urllib.request.HTTPRedirectHandler()
    other = redirect.redirect_request(request, None, 302, "Found", {}, "https://elsewhere/a")
    assert not other.has_header("Authorization")
