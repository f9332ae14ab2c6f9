"""Bases and environments of tests, made once for each version of the code that makes them.

They lie in stores in the user's cache directory; a session's own store has links to them. A store is named after the
digest of the sources that make its entries, so changed sources make them anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.image import base as bases
from envbuild.image.base import StoredBase, make_base
from envbuild.image.layers import environment
from envbuild.image.layers.environment import EnvironmentInputs, environment_key, make_environment
from envbuild.image.layers.groups import plan_layers
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.local import LocalStore

ROOT = Path(__file__).parents[2]
OF_BASES = ("core", "store", "oci", "rootfs", "image/base")
OF_ENVIRONMENTS = (*OF_BASES, "catalog", "lock", "sync", "wheels", "image/layers")
WEEK_SECONDS = 7 * 24 * 3600


def keep_base(selection: Selection, cache: Path) -> None:
    """Have the base of a selection in a session's store."""
    kept = os.environ.get("ENVBUILD_TEST_CACHE")
    _link(_base(selection, Path(kept) if kept else _kept_store(OF_BASES)).path, cache / bases.KIND)


def keep_environment(selection: Selection, lock: LockDirectory, cache: Path) -> None:
    """Have the environment of a lock, and its base, in a session's store."""
    keep_base(selection, cache)
    store = _kept_store(OF_ENVIRONMENTS)
    keep_base(selection, store)
    inputs = EnvironmentInputs(selection=selection, lock=lock, base=_base(selection, store))
    made = make_environment(inputs, _context(store))
    key = environment_key(inputs, plan_layers(lock, selection.base, inputs.base))
    _link(_context(store).store.path_of(environment.KIND, key), cache / environment.KIND)
    for layer in made.layers:
        _link(layer.file.parent, cache / environment.LAYERS)


def _kept_store(packages: tuple[str, ...]) -> Path:
    """The store of this version of some packages; stores that were not used for a week are removed."""
    digest = hashlib.sha256()
    files = [file for name in packages for file in (ROOT / "build/envbuild" / name).rglob("*.py")]
    for file in sorted([*files, *(ROOT / "containers/native").iterdir()]):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envbuild-tests"
    store = above / digest.hexdigest()[:16]
    store.mkdir(parents=True, exist_ok=True)
    os.utime(store)
    for other in above.iterdir():
        if other.stat().st_mtime < time.time() - WEEK_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return store


def _base(selection: Selection, store: Path) -> StoredBase:
    context = _context(store)
    return make_base(selection, context)


def _context(store: Path) -> Context:
    site = load_site({**os.environ, "ENVBUILD_CACHE_DIR": str(store)})
    return Context(store=LocalStore(store, SilentReporter()), site=site, reporter=SilentReporter())


def _link(entry: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if entry.parent != folder:
        with contextlib.suppress(FileExistsError):
            (folder / entry.name).symlink_to(entry)
