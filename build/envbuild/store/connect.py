"""Opens the remote stores that a site has. Libraries are imported here, when one is opened, and not before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from envbuild.core.errors import InternalError
from envbuild.store.address import parse_address
from envbuild.store.remote import Remote


def open_remote(
    url: str,
    *,
    name: str = "",
    reads: bool = True,
    writes: bool = False,
    endpoint: str | None = None,
    ca_bundle: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Remote:
    """The store at an address. Nothing is asked of it yet.

    Args:
        endpoint: of an S3 service that is not Amazon's.

    Raises:
        ConfigurationError: the address is none.
    """
    address = parse_address(url)
    remote = {"address": str(address), "name": name or str(address)}
    match address.scheme:
        case "oci":
            from envbuild.store.repository import OciRepository

            return Remote(backend=OciRepository(address, ca_bundle, environ), reads=reads, writes=writes, **remote)
        case "s3" | "gs":
            from envbuild.store.objects import open_objects

            return Remote(
                backend=open_objects(address, endpoint, ca_bundle, environ), reads=reads, writes=writes, **remote
            )
        case "file":
            from envbuild.store.directory import Directory

            return Remote(backend=Directory(Path(address.path)), reads=reads, writes=writes, **remote)
        case _:
            raise InternalError(f"a store of scheme {address.scheme}")
