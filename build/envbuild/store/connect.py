"""Opens the remote stores that a site has. Libraries are imported here, when one is opened, and not before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from envbuild.store.address import parse_address
from envbuild.store.backend import Backend
from envbuild.store.remote import Remote


def open_remote(
    url: str,
    *,
    endpoint: str | None = None,
    ca_bundle: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Remote:
    """The store at an address, named by it and to be read. Nothing is asked of it yet.

    Args:
        endpoint: of an S3 service that is not Amazon's.

    Raises:
        ConfigurationError: the address is malformed.
    """
    address = parse_address(url)
    # obstore and urllib3 are imported by the modules below, and only for stores that are used.
    backend: Backend
    match address.scheme:
        case "oci":
            from envbuild.store.repository import OciRepository

            backend = OciRepository(address, ca_bundle, environ)
        case "s3" | "gs":
            from envbuild.store.objects import open_objects

            backend = open_objects(address, endpoint, ca_bundle, environ)
        case _:
            from envbuild.store.directory import Directory

            backend = Directory(Path(address.path))
    return Remote(backend=backend, address=str(address), name=str(address))
