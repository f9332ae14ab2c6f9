"""Credentials of registries, where docker and podman keep them: their configuration files and credential helpers."""

from __future__ import annotations

import base64
import binascii
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.core import jsonread
from envbuild.core.errors import MachineError
from envbuild.core.process import ProcessOptions, run

HELPER_SECONDS = 60
# What a helper says when it has nothing (docker-credential-helpers, "credentials/error.go").
NOTHING = "credentials not found in native keychain"
# The user name of an identity token (docker-credential-helpers, README).
TOKEN_USER = "<token>"  # noqa: S105 - the name that says that a token follows
# `docker login` keeps the credentials of Docker Hub under the first of the names below, which is no host of images.
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user name and a secret for a registry.

    Attributes:
        identity_token: the secret is a token to get others with (OAuth2), and no password.
        source: where they were found.
    """

    user: str
    secret: str = field(repr=False)
    identity_token: bool = False
    source: str

    @property
    def basic(self) -> str:
        """The header that names the account and its password (RFC 7617)."""
        from urllib3.util import make_headers

        return make_headers(basic_auth=f"{self.user}:{self.secret}")["authorization"]


def credentials_for(host: str, environ: Mapping[str, str], repository: str = "") -> Credentials | None:
    """The credentials of a registry, or of a repository there; None when there are none.

    Raises:
        MachineError: a configuration file is not JSON, or a credential helper fails.
    """
    names: tuple[str, ...] = (host, f"https://{host}", f"http://{host}", f"https://{host}/v1/", f"https://{host}/v2/")
    if host in DOCKER_HUB:
        host, names = DOCKER_HUB[0], ("https://index.docker.io/v1/", *DOCKER_HUB)
    folders = repository.split("/") if repository else []
    paths = tuple("/".join((host, *folders[:count])) for count in range(len(folders), 0, -1))
    for file in _files(environ):
        config = _read(file)
        if config is not None and (credentials := _in(config, file, names, paths, environ)) is not None:
            return credentials
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """First the files that variables name, then those of containers-auth.json(5), of which docker's is the last."""
    home = Path(environ.get("HOME") or "~").expanduser()
    if named := environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if named := environ.get("DOCKER_CONFIG"):
        yield Path(named) / "config.json"
    # After `su` it may be another user's, which only that user may enter.
    if (named := environ.get("XDG_RUNTIME_DIR")) and os.access(named, os.X_OK):
        yield Path(named) / "containers/auth.json"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"
    if not environ.get("DOCKER_CONFIG"):
        yield home / ".docker/config.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = jsonread.foreign(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"the registry credentials in {path} cannot be read",
            why=error.strerror or "" if isinstance(error, OSError) else "It is not JSON.",
            fix="Correct the file, or make it anew with `docker login` or `podman login`.",
        ) from error
    return document if isinstance(document, dict) else {}


def _in(
    config: Mapping[str, Any], path: Path, names: tuple[str, ...], paths: tuple[str, ...], environ: Mapping[str, str]
) -> Credentials | None:
    """What a file has for a registry, by its names, or for the paths of a repository, the nearest first."""
    helpers, auths = config.get("credHelpers") or {}, config.get("auths") or {}
    # As docker does: a helper of the registry, then what the file holds, then the helper of all registries.
    for name in names:
        if helper := helpers.get(name):
            return _ask(str(helper), name, path, environ)
    # containers-auth.json(5): the nearest path, then the registry. Helpers know registries alone.
    for name in (*paths, *names):
        if isinstance(entry := auths.get(name), dict) and (credentials := _decoded(entry, path)) is not None:
            return credentials
    if config.get("credsStore"):
        return _ask(str(config["credsStore"]), names[0], path, environ)
    return None


def _decoded(entry: Mapping[str, Any], path: Path) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(user=TOKEN_USER, secret=str(token), identity_token=True, source=str(path))
    try:
        user, _, secret = base64.b64decode(str(entry.get("auth") or "")).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise MachineError(
            f"the registry credentials in {path} cannot be read",
            why="An auth in it is not base64.",
            fix="Make the file anew with `docker login` or `podman login`.",
        ) from error
    # docker itself takes NUL characters from the end of a password (docker/cli, cli/config/configfile, decodeAuth).
    user, secret = str(entry.get("username") or user), str(entry.get("password") or secret.rstrip("\0"))
    return Credentials(user=user, secret=secret, source=str(path)) if user else None


def _ask(helper: str, name: str, path: Path, environ: Mapping[str, str]) -> Credentials | None:
    """What a credential helper prints, which is never shown."""
    program = shutil.which(f"docker-credential-{helper}", path=environ.get("PATH", os.defpath))
    if program is None:
        raise MachineError(
            f"the credential helper docker-credential-{helper} is not installed",
            why=f"{path} names it for {name}, and it is not on PATH.",
            fix="Install it, or take it out of the file and use `docker login`.",
        )
    finished = run(
        # The protocol: the address goes in by standard input, JSON comes out (docker-credential-helpers, README).
        [program, "get"],
        what=f"ask {Path(program).name} for the credentials of {name}",
        check=False,
        options=ProcessOptions(
            stdin=name.encode(),
            env={**environ, "LC_ALL": "C"},  # a shell warns of a locale that is not there
            timeout_seconds=HELPER_SECONDS,
            error=MachineError,
        ),
    )
    if finished.status != 0 and NOTHING in finished.output:
        return None
    try:
        if finished.status != 0:
            raise ValueError("it failed")
        answer = jsonread.foreign(finished.output)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise MachineError(
            f"the credential helper {Path(program).name} has no credentials for {name}",
            why=f"It ended with status {finished.status}; what it printed may be secret and is not shown.",
            fix=f"Run it by hand: echo {name} | {Path(program).name} get",
        ) from error
    return Credentials(
        user=user, secret=secret, identity_token=user == TOKEN_USER, source=f"the helper {Path(program).name}"
    )
