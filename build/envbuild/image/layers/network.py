"""How a step inside a sandbox reaches the network as this machine does: resolver, certificates, proxies, indexes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.sandbox import Bind
from envbuild.lock.uv.settings import NO_FAST_PATH, reaches_indexes
from envbuild.lock.uv.torch_builds import TorchSource

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_LOCAL = re.compile(r"file://(/[^\s,]*)")
_RESOLVER = ("/etc/resolv.conf", "/etc/hosts")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a sandbox needs for the network: binds, variables, and where packages are as seen inside."""

    binds: tuple[Bind, ...]
    environment: Mapping[str, str]
    source: TorchSource


def access(site: Site, source: TorchSource, folder: str, environ: Mapping[str, str] = os.environ) -> Access:
    """The machine's way to the network for a sandbox; local things are bound below ``folder``."""
    # Links are followed here: systemd-resolved's /etc/resolv.conf leads to /run, which the sandbox does not have.
    binds = [Bind(source=Path(name).resolve(), target=name) for name in _RESOLVER if Path(name).exists()]
    # By name, and nothing else: builds of packages run here, and the environment may hold credentials.
    values = {
        name: value
        for name, value in environ.items()
        if name.lower() in _PROXIES or (value and (reaches_indexes(name) or name == NO_FAST_PATH))
    }
    if site.ca_bundle is not None:
        binds.append(Bind(source=site.ca_bundle.resolve(), target=f"{folder}/ca.pem"))
        values["SSL_CERT_FILE"] = f"{folder}/ca.pem"
    # As uv finds it: NETRC, else the home directory, which inside is another one.
    netrc = Path(environ.get("NETRC") or Path(environ.get("HOME") or "/") / ".netrc")
    if netrc.is_file():
        binds.append(Bind(source=netrc.resolve(), target=f"{folder}/netrc"))
        values["NETRC"] = f"{folder}/netrc"
    binds += _uv_configuration(folder, environ, values)

    def seen(text: str) -> str:
        """``text`` with the file:// places in it as they are seen inside, where they are bound."""

        def bound(match: re.Match[str]) -> str:
            bind = Bind(source=Path(match[1]), target=f"{folder}/local/{len(binds)}")
            binds.append(bind)
            return f"file://{bind.target}"

        return _LOCAL.sub(bound, text)

    values = {name: seen(value) if name.startswith("UV_") else value for name, value in values.items()}
    location = source.location and seen(source.location)
    if (local := source.folder()) is not None:
        binds.append(Bind(source=local, target=f"{folder}/wheels"))
        location = f"{folder}/wheels"
    indexes = tuple(replace(index, url=seen(index.url)) for index in source.indexes)
    inside = replace(source, location=location, indexes=indexes)
    return Access(binds=tuple(binds), environment=values, source=inside)


def _uv_configuration(folder: str, environ: Mapping[str, str], values: dict[str, str]) -> list[Bind]:
    """The configuration files of uv, which may name indexes; seen where uv looks for them."""
    if named := environ.get("UV_CONFIG_FILE"):
        # uv reads no other configuration then (its documentation, "Configuration files").
        values["UV_CONFIG_FILE"] = f"{folder}/uv.toml"
        return [Bind(source=Path(named).resolve(), target=f"{folder}/uv.toml")]
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")
    places = (
        (home / "uv/uv.toml", "XDG_CONFIG_HOME", f"{folder}/user"),
        (Path("/etc/uv/uv.toml"), "XDG_CONFIG_DIRS", f"{folder}/system"),
    )
    binds = []
    for file, variable, seen in places:
        if file.is_file():
            binds.append(Bind(source=file.resolve(), target=f"{seen}/uv/uv.toml"))
            values[variable] = seen
    return binds
