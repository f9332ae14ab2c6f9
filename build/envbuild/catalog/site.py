"""The site's configuration: where things live here. It never enters a lock, an image or a certificate."""

from __future__ import annotations

import configparser
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from envbuild.catalog import toml
from envbuild.catalog.fields import Name, TomlModel
from envbuild.catalog.stores import Store, StoreSettings, stores_in_force
from envbuild.core.errors import ConfigurationError
from envbuild.core.exit_status import mask
from envbuild.store.address import parse_address

PUBLIC_TORCH_INDEX = "https://download.pytorch.org/whl/{build}"
PIP_CONFIG_OF_ALL = Path("/etc/pip.conf")
# Debian and Ubuntu; Fedora and Red Hat.
CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
# Other schemes than http are names of apt's methods, which may be added to it (file:/, copy:/, mirror+file:/, s3://).
_URL = r"(https?://[^\s/]+\S*|(?!https?:)[a-z][a-z0-9+-]*:/\S+)"
_APT_URL = re.compile(rf"{_URL}")
# sources.list(5), "one-line-style": a suite that is a path ends in a slash and has no components.
_APT_SOURCE = re.compile(rf"deb (\s*\[[^]]*\])?\s*{_URL}\s+(\S+/|\S+(\s+[^\s/]+)+)")

# As uv names them: UV_INDEX=NAME=URL.
_INDEX = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)=(?P<url>(https?|file)://\S+)")


class TorchBuilds(TomlModel):
    """Where named builds of torch (``+cpu``, ``+cu130``) are found."""

    find_links: tuple[str, ...] = Field(default=(), description="folders or pages with torch wheels, tried first")
    index: str = Field(default=PUBLIC_TORCH_INDEX, description="an index; {build} becomes 'cpu', 'cu130', ...")


class Signing(TomlModel):
    """Whose certificates are made and believed here. Secrets are named, never written here."""

    key: str | None = Field(default=None, description="the private key that signs: a PEM file, or env:NAME")
    password: str | None = Field(default=None, description="of that key: env:NAME or file:PATH")
    trust: str | None = Field(default=None, description="the file of public keys that are trusted")


class SiteFile(TomlModel):
    """``~/.config/envbuild/config.toml`` (or the file that ENVBUILD_CONFIG names)."""

    cache_dir: str | None = Field(default=None, description="where the store is; default ~/.cache/envbuild")
    state_dir: str | None = Field(default=None, description="where the ledger is; default ~/.local/state/envbuild")
    # Without it, behind a site's proxy, pip reports "No matching distribution found" and no certificate.
    ca_bundle: str | None = Field(default=None, description="PEM file that network access inside builds trusts")
    apt_mirror: str | None = Field(default=None, description="mirror for mmdebstrap instead of the machine's sources")
    base_repositories: tuple[str, ...] = Field(
        default=(), description="HOST/REPOSITORY: where published bases are, asked in this order"
    )
    torch_builds: TorchBuilds = TorchBuilds()
    indexes: dict[str, str] = Field(
        default={}, description="where indexes are that components name in [tool.uv.sources], by that name"
    )
    signing: Signing = Signing()
    stores: dict[Name, StoreSettings] = Field(default={}, description="remote stores, besides the local one, by name")


class Site(TomlModel):
    """The configuration in force: file, environment and defaults together."""

    cache_dir: Path
    state_dir: Path
    ca_bundle: Path | None
    apt_mirror: str | None
    base_repositories: tuple[str, ...] = ()
    find_links: tuple[str, ...] = Field(description="from the file, uv's variable, pip's variable and pip's files")
    torch_index: str
    indexes: dict[str, str] = Field(default={}, description="of the file and UV_INDEX, addresses by name")
    signing: Signing = Field(default=Signing(), description="of the file and the environment; paths from the root")
    known_stores: dict[str, StoreSettings] = Field(default={}, description="remote stores of the file")
    stores: tuple[Store, ...] = Field(default=(), description="remote stores in force, in the order they are asked")


def load_site(environ: Mapping[str, str] = os.environ) -> Site:
    """Read the site's configuration; environment variables win over the file.

    Raises:
        ConfigurationError: the file is wrong, or ENVBUILD_CONFIG names one that is not there.
    """
    home = _home(environ)
    named = environ.get("ENVBUILD_CONFIG")
    path = Path(named) if named else _xdg("XDG_CONFIG_HOME", home / ".config", environ) / "envbuild/config.toml"
    # The default file need not exist; a link that leads nowhere was meant to be one.
    file = toml.load(path, SiteFile, _wanted(named)) if named or os.path.lexists(path) else SiteFile()
    cache = environ.get("ENVBUILD_CACHE_DIR") or file.cache_dir
    state = environ.get("ENVBUILD_STATE_DIR") or file.state_dir
    return Site(
        cache_dir=_expanded(cache, home) if cache else _xdg("XDG_CACHE_HOME", home / ".cache", environ) / "envbuild",
        state_dir=_expanded(state, home)
        if state
        else _xdg("XDG_STATE_HOME", home / ".local/state", environ) / "envbuild",
        ca_bundle=_ca_bundle(file, home, environ),
        apt_mirror=_apt_mirror(file, environ),
        base_repositories=_base_repositories(file, environ),
        find_links=_find_links(file, home, environ),
        torch_index=environ.get("ENVBUILD_TORCH_INDEX") or file.torch_builds.index,
        indexes=_indexes(file, environ),
        signing=_signing(file, home, environ),
        known_stores=file.stores,
        stores=stores_in_force(file.stores, environ),
    )


def _wanted(named: str | None) -> toml.Wanted:
    return toml.Wanted(
        "the configuration file",
        why="ENVBUILD_CONFIG names it." if named else "The settings of this account are looked for there.",
        fix="Create it, or unset ENVBUILD_CONFIG." if named else "Put the settings there as a file, or remove it.",
    )


def _home(environ: Mapping[str, str]) -> Path:
    """The user's home; the password database says where, when HOME does not name a place from the root."""
    # Path.home() takes a relative HOME as it is.
    named = Path(environ.get("HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir).absolute()
    except KeyError:
        raise ConfigurationError(
            "this account has no home directory",
            why=f"HOME is {environ.get('HOME')!r}, and the password database does not know user {os.getuid()}.",
            fix="Set HOME to a directory, as a path from the root.",
        ) from None


def _signing(file: SiteFile, home: Path, environ: Mapping[str, str]) -> Signing:
    key = environ.get("ENVBUILD_SIGNING_KEY") or file.signing.key
    trust = environ.get("ENVBUILD_TRUST") or file.signing.trust
    return Signing(
        key=key if not key or key.startswith("env:") else str(_expanded(key.removeprefix("file:"), home)),
        password=environ.get("ENVBUILD_SIGNING_PASSWORD") or file.signing.password,
        trust=str(_expanded(trust, home)) if trust else None,
    )


def _xdg(variable: str, default: Path, environ: Mapping[str, str]) -> Path:
    """A folder of the XDG Base Directory Specification, which has relative paths ignored."""
    named = Path(environ.get(variable, ""))
    return named if named.is_absolute() else default


def _expanded(text: str, home: Path) -> Path:
    """A path as people write it, from the root."""
    # expanduser() goes by HOME, which may not be the home chosen here.
    if text == "~" or text.startswith("~/"):
        return home / text[2:]
    return Path(text).expanduser().absolute()


def _apt_mirror(file: SiteFile, environ: Mapping[str, str]) -> str | None:
    """The mirror: one URL, or whole one-line sources.

    Raises:
        ConfigurationError: it is neither.
    """
    variable = environ.get("ENVBUILD_APT_MIRROR", "").strip()
    mirror = variable or (file.apt_mirror or "").strip()
    sources = [line.strip() for line in mirror.splitlines() if line.strip() and not line.startswith("#")]
    wrong = [] if _APT_URL.fullmatch(mirror) else [line for line in sources if not _APT_SOURCE.fullmatch(line)]
    if wrong or mirror.startswith("#"):
        raise ConfigurationError(
            f"{'ENVBUILD_APT_MIRROR' if variable else 'apt_mirror'} is not a mirror: {(wrong or [mirror])[0]!r}",
            why="It is a URL (http://HOST/debian, file:/srv/debian), or whole sources, one a line "
            "(deb [signed-by=/KEYRING] URL SUITE COMPONENT ...).",
            fix="Correct it, or unset it to use this machine's own apt sources.",
        )
    return mirror or None


def _base_repositories(file: SiteFile, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where published bases are.

    Raises:
        ConfigurationError: one is not the address of a repository.
    """
    named = tuple(environ.get("ENVBUILD_BASE_REPOSITORIES", "").split()) or file.base_repositories
    try:
        addresses = [parse_address(f"oci://{name.removeprefix('oci://')}") for name in named]
    except ConfigurationError as error:
        fix = "Correct ENVBUILD_BASE_REPOSITORIES, or base_repositories of the configuration file."
        raise error.with_context(fix=fix) from error
    return tuple(f"{address.host}/{address.path}" for address in addresses)


def _ca_bundle(file: SiteFile, home: Path, environ: Mapping[str, str]) -> Path | None:
    for named in (file.ca_bundle, environ.get("SSL_CERT_FILE"), environ.get("PIP_CERT")):
        if named:
            path = _expanded(named, home)
            if not path.is_file():
                raise ConfigurationError(
                    f"the CA bundle {path} does not exist",
                    why="ca_bundle, SSL_CERT_FILE or PIP_CERT names it.",
                    fix="Correct the setting, or unset it to use the system's bundle.",
                )
            return path
    return next((Path(name) for name in CA_FILES if Path(name).is_file()), None)


def _indexes(file: SiteFile, environ: Mapping[str, str]) -> dict[str, str]:
    """The indexes with a name; uv's variable comes first, as it does for uv.

    Raises:
        ConfigurationError: the file has what is no name or no address of an index, or two names share a password.
    """
    for name, url in file.indexes.items():
        if not _INDEX.fullmatch(f"{name}={url}"):
            raise ConfigurationError(
                f"[indexes] {name} of the configuration file is not an index: {mask(url)!r}",
                why="A name has letters, digits, '-', '_' and '.', and its value is a URL (https://HOST/simple).",
                fix="Correct it.",
            )
    named = (match for word in environ.get("UV_INDEX", "").split() if (match := _INDEX.fullmatch(word)))
    indexes = {**file.indexes, **{match["name"]: match["url"] for match in named}}
    first: dict[str, str] = {}
    for name, url in indexes.items():
        other = first.setdefault(index_variable(name), name)
        if indexes[other].rstrip("/") != url.rstrip("/"):
            raise ConfigurationError(
                f"indexes {other!r} and {name!r} have the same variables for their passwords",
                why=f"uv reads {index_variable(name)}_PASSWORD for both, and would send one's password to the other.",
                fix="Give one of them another name, in [indexes] of the configuration file or in UV_INDEX.",
            )
    return indexes


def index_variable(name: str) -> str:
    """What the variables with the user and the password of an index begin with."""
    # In capitals, other characters as underscores (uv's documentation, "Package indexes").
    return f"UV_INDEX_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"


def _find_links(file: SiteFile, home: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    places = [*file.torch_builds.find_links]
    # uv separates places with commas, pip with blanks.
    places += environ.get("UV_FIND_LINKS", "").split(",")
    places += environ.get("PIP_FIND_LINKS", "").split()
    # As pip, which reads its files with RawConfigParser: a % in a URL stands for itself.
    config = configparser.ConfigParser(interpolation=None)
    for name in _pip_files(home, environ):
        try:
            config.read(name)
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself reports its broken files
        # pip takes an option from [global] and from the section of its command; these commands fetch packages.
        for section in ("global", "install", "download", "wheel"):
            places += config.get(section, "find-links", fallback="").split()
        config.clear()
    return tuple(dict.fromkeys(place.strip() for place in places if place.strip()))


def _pip_files(home: Path, environ: Mapping[str, str]) -> list[Path]:
    """The files that pip reads, but for that of its own virtual environment."""
    # pip has no public interface for its configuration; these are the rules of its Configuration.iter_config_files.
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return []
    folders = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    files = [*(Path(folder) / "pip/pip.conf" for folder in folders if folder), PIP_CONFIG_OF_ALL]
    # In the place of the user's files, if it exists.
    if named and os.path.exists(named):  # noqa: PTH110 - Path.exists() raises where it may not look
        return [*files, Path(named)]
    return [*files, _xdg("XDG_CONFIG_HOME", home / ".config", environ) / "pip/pip.conf", home / ".pip/pip.conf"]
