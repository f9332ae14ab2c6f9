"""A site's configuration without a file or an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envbuild.catalog.context import Context
from envbuild.catalog.site import Site
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore


def site_of(**values: Any) -> Site:
    """A site with these settings, and nothing else."""
    nowhere = Path("/nonexistent")
    places = {"cache_dir": nowhere, "state_dir": nowhere, "ca_bundle": None, "apt_mirror": None, "find_links": ()}
    return Site(**{**places, "torch_index": "https://t/{build}", **values})


def context_of(folder: Path, **values: Any) -> Context:
    """A site with a store of its own below a folder."""
    store = LocalStore(folder / "store", SilentReporter())
    return Context(store=store, site=site_of(**values), reporter=store.reporter)
