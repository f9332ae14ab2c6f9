"""Requests with the credentials that uv would send: for the files that a uv.lock names, which it writes without them.

uv takes them from the index's URL (variables and uv.toml), from variables of a named index, and from a netrc file; they
hold for the scheme, host and port of that URL. A keyring is not asked.
"""

from __future__ import annotations

import base64
import netrc
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from envbuild.catalog.site import index_variable
from envbuild.lock.uv.index_settings import IndexSetting, index_settings


def request_for(
    url: str, environ: Mapping[str, str] = os.environ, named: Mapping[str, str] | None = None
) -> urllib.request.Request:
    """A request for ``url`` without the credentials in its text, and with the header that they make.

    The header stays with the host: it is not sent on when that redirects to another.

    Args:
        named: addresses of the site's own indexes by name, besides those of uv's settings.
    """
    parts = urllib.parse.urlsplit(url)
    own, _, host = parts.netloc.rpartition("@")
    bare = urllib.parse.urlunsplit(parts._replace(netloc=host))
    request = urllib.request.Request(bare)  # noqa: S310 - from uv's or the site's own settings
    if (known := _userinfo(own) or credentials(bare, environ, named)) is not None:
        token = base64.b64encode(":".join(known).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


def credentials(
    url: str, environ: Mapping[str, str] = os.environ, named: Mapping[str, str] | None = None
) -> tuple[str, str] | None:
    """User name and password for ``url`` (without any in it); None where there are none."""
    realm = _realm(url)
    if realm is None:
        return None
    own = (IndexSetting(address, "explicit", name) for name, address in (named or {}).items())
    for index in (*index_settings(environ), *own):
        if _realm(index.url) != realm:
            continue
        prefix = index_variable(index.name)
        given = (environ.get(f"{prefix}_USERNAME", ""), environ.get(f"{prefix}_PASSWORD", "")) if index.name else None
        if given is not None and any(given):
            return given
        if (credentials := _userinfo(urllib.parse.urlsplit(index.url).netloc.rpartition("@")[0])) is not None:
            return credentials
    return _from_netrc(realm[1], environ)


def _realm(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


def _userinfo(text: str) -> tuple[str, str] | None:
    if not text:
        return None
    user, _, password = text.partition(":")
    return urllib.parse.unquote(user), urllib.parse.unquote(password)


def _from_netrc(host: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or "~").expanduser() / ".netrc")
    try:
        entry = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    # A netrc entry has a login, an account and a password; any may be missing.
    return (entry[0] or entry[1] or "", entry[2] or "") if entry else None
