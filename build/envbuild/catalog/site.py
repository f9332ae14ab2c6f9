"""The site's configuration: where things live here. It never enters a lock, an image or a certificate."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from envbuild.catalog import toml
from envbuild.catalog.models import Model
from envbuild.core.errors import ConfigurationError

PUBLIC_TORCH_INDEX = "https://download.pytorch.org/whl/{build}"
PIP_CONFIG_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


class TorchBuilds(Model):
    """Where named builds of torch (``+cpu``, ``+cu130``) are found."""

    find_links: tuple[str, ...] = Field(default=(), description="folders or pages with torch wheels, tried first")
    index: str = Field(default=PUBLIC_TORCH_INDEX, description="an index; {build} becomes 'cpu', 'cu130', ...")


class SiteFile(Model):
    """``~/.config/envbuild/config.toml`` (or the file that ENVBUILD_CONFIG names)."""

    cache_dir: str | None = Field(default=None, description="where the store is; default ~/.cache/envbuild")
    ca_bundle: str | None = Field(default=None, description="PEM file that network access inside builds trusts")
    apt_mirror: str | None = Field(default=None, description="mirror for mmdebstrap instead of the machine's sources")
    torch_builds: TorchBuilds = TorchBuilds()


class Site(Model):
    """The configuration in force: file, environment and defaults together."""

    cache_dir: Path
    ca_bundle: Path | None
    apt_mirror: str | None
    find_links: tuple[str, ...] = Field(description="from the file, uv's variable, pip's variable and pip's files")
    torch_index: str


def load_site(environ: Mapping[str, str] = os.environ) -> Site:
    """Read the site's configuration; environment variables win over the file.

    Raises:
        ConfigurationError: the file is wrong, or ENVBUILD_CONFIG names one that is not there.
    """
    home = Path(environ.get("HOME") or "~").expanduser()
    named = environ.get("ENVBUILD_CONFIG")
    path = Path(named) if named else Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "envbuild/config.toml"
    if path.is_file():
        file = toml.load(path, SiteFile)
    elif named:
        raise ConfigurationError(
            f"the configuration file {path} does not exist",
            why="ENVBUILD_CONFIG names it.",
            fix="Create it, or unset ENVBUILD_CONFIG.",
        )
    else:
        file = SiteFile()
    cache = environ.get("ENVBUILD_CACHE_DIR") or file.cache_dir
    default_cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "envbuild"
    return Site(
        cache_dir=Path(cache).expanduser().absolute() if cache else default_cache,
        ca_bundle=_ca_bundle(file, environ),
        apt_mirror=environ.get("ENVBUILD_APT_MIRROR") or file.apt_mirror,
        find_links=_find_links(file, environ),
        torch_index=environ.get("ENVBUILD_TORCH_INDEX") or file.torch_builds.index,
    )


def _ca_bundle(file: SiteFile, environ: Mapping[str, str]) -> Path | None:
    for asked in (file.ca_bundle, environ.get("SSL_CERT_FILE"), environ.get("PIP_CERT")):
        if asked:
            path = Path(asked).expanduser()
            if not path.is_file():
                raise ConfigurationError(
                    f"the CA bundle {path} does not exist",
                    why="ca_bundle, SSL_CERT_FILE or PIP_CERT names it.",
                    fix="Correct the setting, or unset it to use the system's bundle.",
                )
            return path
    return next((Path(name) for name in CA_FILES if Path(name).is_file()), None)


def _find_links(file: SiteFile, environ: Mapping[str, str]) -> tuple[str, ...]:
    places = [*file.torch_builds.find_links]
    places += environ.get("UV_FIND_LINKS", "").split(",")
    places += environ.get("PIP_FIND_LINKS", "").split()
    config = configparser.ConfigParser(interpolation=None)
    named = environ.get("PIP_CONFIG_FILE")
    files = [named] if named else [str(Path(name).expanduser()) for name in PIP_CONFIG_FILES]
    for name in files:
        try:
            config.read(name)
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself reports its broken files
        for section in ("global", "install", "download", "wheel"):
            places += config.get(section, "find-links", fallback="").split()
        config.clear()
    return tuple(dict.fromkeys(place.strip() for place in places if place.strip()))
