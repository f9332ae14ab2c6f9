"""Opens the repositories that images are published to and fetched from: ``HOST/REPOSITORY``, as docker writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from envbuild.catalog.site import Site
from envbuild.core.errors import UsageError
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry
from envbuild.store.registry_errors import Wording

SCHEME = "oci://"


def open_repository(to: str, site: Site, *, mount_from: Sequence[str] = ()) -> Registry:
    """The repository at an address; nothing is asked of it yet.

    Args:
        to: ``HOST[:PORT]/REPOSITORY``; ``oci://`` may stand in front.
        mount_from: other repositories of the same registry, which blobs are taken over from.

    Raises:
        UsageError: the address is of something else than a registry.
        ConfigurationError: it is malformed, or has a password in it.
    """
    address = parse_address(to if "://" in to else SCHEME + to)
    if address.scheme != "oci":
        raise UsageError(
            f"{address} is not a repository of a registry",
            why="Images go to a registry: HOST/REPOSITORY.",
            fix="Name one. A bucket or a directory takes .sqsh files: --sqsh-to.",
        )
    return Registry(address, site.ca_bundle, os.environ, Wording(noun="registry"), also_read=mount_from)
