"""Opens the remote stores that a site has. Libraries are imported here, when one is opened, and not before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from envbuild.core.errors import ConfigurationError
from envbuild.store.address import BUCKET_SCHEMES, Address, parse_address
from envbuild.store.backend import Backend, ObjectStore
from envbuild.store.registry_errors import STORE, Wording
from envbuild.store.remote import Remote


def open_remote(
    url: str,
    *,
    endpoint: str | None = None,
    ca_bundle: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    wording: Wording = STORE,
) -> Remote:
    """The store at an address, named by it and to be read. Nothing is asked of it yet.

    Args:
        endpoint: of an S3 service that is not Amazon's.
        wording: how its errors speak of it.

    Raises:
        ConfigurationError: the address is malformed.
    """
    address = parse_address(url)
    # obstore and urllib3 are imported by the modules below, and only for stores that are used.
    backend: Backend
    match address.scheme:
        case "oci":
            from envbuild.store.repository import OciRepository

            backend = OciRepository(address, ca_bundle, environ, wording)
        case _:
            from envbuild.store.objects import Objects

            backend = Objects(
                open_object_store(address, endpoint=endpoint, ca_bundle=ca_bundle, environ=environ, wording=wording)
            )
    return Remote(backend=backend, address=str(address), name=str(address))


def open_object_store(
    address: Address,
    *,
    endpoint: str | None = None,
    ca_bundle: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    wording: Wording = STORE,
) -> ObjectStore:
    """The bucket or directory at an address. Nothing is asked of it yet.

    Args:
        endpoint: of an S3 service that is not Amazon's.
        wording: how its errors speak of it.

    Raises:
        ConfigurationError: it is a registry, which has no objects.
    """
    match address.scheme:
        case scheme if scheme in BUCKET_SCHEMES:
            from envbuild.store.bucket import open_bucket

            return open_bucket(address, endpoint, ca_bundle, environ, wording)
        case "file":
            from envbuild.store.share import Share

            return Share(Path(address.path), wording)
        case _:
            raise ConfigurationError(
                f"{address} is not the address of a {wording.noun}",
                why="A registry has no objects by their paths.",
                fix="Name a bucket or a directory: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, file:///DIRECTORY.",
            )
