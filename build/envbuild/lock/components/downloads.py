"""The files that a uv.lock names: downloaded with the credentials that uv would send, verified, kept in the store."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError, ResolutionError
from envbuild.core.exit_status import mask
from envbuild.lock.context import WorkContext
from envbuild.lock.uv.credentials import request_for

DOWNLOAD_SECONDS = 300
FILE = "file"


def fetch_sdist(package: Mapping[str, Any], context: WorkContext) -> tuple[bytes, str]:
    """The sdist of a ``[[package]]`` of a uv.lock, verified, and its digest; kept in the store.

    Raises:
        ResolutionError: the package has no sdist.
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    sdist = package.get("sdist")
    title = f"{package['name']} {package['version']}"
    if sdist is None:
        raise ResolutionError(
            f"{title} has no sdist",
            why="A component of the compile phase is built from its sources.",
            fix='Give it phase = "main" in the stack\'s file if its wheels are meant, or choose another version.',
        )
    return fetch_file(sdist, f"the sdist of {title}", context)


def fetch_file(file: Mapping[str, Any], title: str, context: WorkContext) -> tuple[bytes, str]:
    """A file that a uv.lock names, verified, and its digest; kept in the store.

    Paths in uv.lock count from the folder of the context.

    Raises:
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    digest = str(file.get("hash", ""))

    def download(entry: Path) -> None:
        content = _read(file, title, context)
        if digest and sha256_bytes(content) != digest:
            raise CheckRefusedError(
                f"{title} is not the file that the index states",
                why=f"Stated {digest}, downloaded {sha256_bytes(content)}.",
                fix="Try again; if it stays, the index or a proxy serves another file.",
            )
        (entry / FILE).write_bytes(content)

    if not digest:
        content = _read(file, title, context)
        return content, sha256_bytes(content)
    return (context.store.get_or_build("files", digest, download).path / FILE).read_bytes(), digest


def _read(file: Mapping[str, Any], title: str, context: WorkContext) -> bytes:
    if "path" in file:
        return (context.folder / str(file["path"])).read_bytes()
    url = str(file["url"])
    try:
        bundle = context.site.ca_bundle
        trust = ssl.create_default_context(cafile=str(bundle)) if bundle else None
        request = request_for(url)
        with urllib.request.urlopen(request, timeout=DOWNLOAD_SECONDS, context=trust) as answer:  # noqa: S310 - uv's own URL
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NetworkError(
            f"cannot download {title}",
            why=f"{mask(url)}: {getattr(error, 'reason', error)}",
            fix="Check the network, the proxy and the CA bundle (SSL_CERT_FILE), then run again. Where the index asks "
            "for a password: its URL, UV_INDEX_NAME_USERNAME and UV_INDEX_NAME_PASSWORD, or a netrc file have it.",
        ) from error
