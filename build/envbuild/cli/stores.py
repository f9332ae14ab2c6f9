"""The options about remote stores, and the stores they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from envbuild.catalog.stores import StoreMode
from envbuild.cli.common import Session
from envbuild.cli.options import option
from envbuild.core.errors import UsageError
from envbuild.store.remote import Remote


def store_name(text: str) -> Any:
    return option("--store STORE", text, default="")


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The remote stores that a command reads and writes."""

    store: str = store_name("A remote store: its name in the configuration, or its address; 'off' for none.")
    store_mode: str | None = option(
        "--store-mode",
        "Whether remote stores are read, written, or both; default: as configured, else read.",
        type=click.Choice([known.value for known in StoreMode]),
    )


def one_store(session: Session, store: str) -> Remote:
    """The store that a command is about: the one named, or the only one that is configured.

    Raises:
        UsageError: there is none, or there are several.
    """
    remotes = session.remotes(store)
    if len(remotes) != 1:
        names = ", ".join(remote.name for remote in remotes)
        raise UsageError(
            "which remote store is meant is not clear" if remotes else "there is no remote store",
            why=f"These are configured: {names}." if remotes else "None is configured, or it is switched off.",
            fix="Name one with --store: a name of the configuration file, or an address such as s3://BUCKET/PREFIX.",
        )
    return remotes[0]
