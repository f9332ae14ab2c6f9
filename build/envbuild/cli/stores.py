"""The options about remote stores, and the stores they mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from envbuild.catalog.stores import StoreMode
from envbuild.cli.common import F, Session
from envbuild.core.errors import UsageError
from envbuild.store.remote import Remote


def store_option(text: str) -> Callable[[F], F]:
    return click.option("--store", "store", metavar="STORE", default="", help=text)


def store_options(function: F) -> F:
    """Add ``--store`` and ``--store-mode``; the command receives them as one function that opens the stores."""

    @store_option("A remote store: its name in the configuration, or its address; 'off' for none.")
    @click.option(
        "--store-mode",
        type=click.Choice([known.value for known in StoreMode]),
        default=None,
        help="Whether remote stores are read, written, or both; default: as configured, else read.",
    )
    @functools.wraps(function)
    def wrapper(*args: Any, store: str, store_mode: str | None, **kwargs: Any) -> Any:
        # The session is made by output_options, after this decorator ran.
        def opened(session: Session) -> tuple[Remote, ...]:
            return session.remotes(store, store_mode or "")

        return function(*args, stores=opened, **kwargs)

    return wrapper  # type: ignore[return-value]


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
            why=f"Configured are: {names}." if remotes else "None is configured, or it is switched off.",
            fix="Name one with --store: a name of the configuration file, or an address such as s3://BUCKET/PREFIX.",
        )
    return remotes[0]
