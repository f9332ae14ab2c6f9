"""``envbuild gc``: what no tag, no lock and none of the last nights needs: in a repository, and in the store here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from envbuild.core.errors import ConfigurationError
from envbuild.image.build import KIND as IMAGES
from envbuild.image.layers.environment import KIND as ENVIRONMENTS
from envbuild.image.layers.environment import LAYERS
from envbuild.image.record import EnvironmentLayerRecord, EnvironmentRecord, ImageRecord
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import ImageRow, NightRow, PublicationRow, StepRow
from envbuild.lock.lockfile import LOCKFILES, RECORD_FILE, read_lock
from envbuild.publish.collect import Needs
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE as STORE_RECORD
from envbuild.store.record import load
from envbuild.wheels.cache.prune import DAY_SECONDS, Old

M = TypeVar("M", bound=BaseModel)
# An entry that was used lately may be of a build that goes on. The time of its folder is that of its last use.
REST_DAYS = 1.0


def what_stays(ledger: Ledger, project: Path, out_dir: Path, nights: int) -> Needs:
    """The needs of the project's locks, of the images in its output folder and of the last nights of each stack.

    Raises:
        CheckRefusedError: a lock is damaged: what it needs is not known.
    """
    locks = {read_lock(path.parent).lock.digest for path in sorted((project / LOCKFILES).glob(f"*/*/{RECORD_FILE}"))}
    images = {record.oci_digest for record in _images((out_dir / "images").glob(f"*/{STORE_RECORD}"))}
    stacks = {night.stack for night in ledger.rows(NightRow)}
    last = {night.id for stack in stacks for night in ledger.rows(NightRow, stack=stack, newest=nights)}
    steps = [step for step in ledger.rows(StepRow) if step.night in last]
    locks |= {step.lock_digest for step in steps if step.lock_digest}
    images |= {row.oci_digest for row in ledger.rows(ImageRow) if row.lock_digest in locks}
    images |= _heads(ledger)
    return Needs(locks=frozenset(locks), images=frozenset(images))


def _heads(ledger: Ledger) -> set[str]:
    """The images that moving tags name: the newest of each that was not revoked."""
    newest: dict[tuple[str, str], PublicationRow] = {}
    # Oldest first: the newest stays.
    for row in ledger.rows(PublicationRow):
        if row.revoked_at is None:
            newest[row.repository, row.moving_tag] = row
    return {row.oci_digest for row in newest.values()}


def stored_images(store: LocalStore) -> int:
    """The number of images in the store, including those with a damaged record."""
    return sum(1 for _ in _entries(store, IMAGES))


def unneeded_entries(store: LocalStore, kept: Needs, *, unused_days: float = REST_DAYS) -> tuple[Old, ...]:
    """Images, environments and layers of the store that nothing kept has, and that were not used for some days."""
    since = time.time() - unused_days * DAY_SECONDS
    images = list(_entries(store, IMAGES))
    staying: set[str] = set()
    old: list[Old] = []
    for path in images:
        record = _loaded(path, ImageRecord)
        if record is not None and (record.oci_digest in kept.images or record.lock_digest in kept.locks):
            staying |= {layer.digest for layer in record.layers}
        else:
            old.append(_old(IMAGES, path, f"image {path.name[:12]}"))
    layers = {path: _loaded(path, EnvironmentLayerRecord) for path in _entries(store, LAYERS)}
    # Images name their layers by digest, environments by key.
    kept_keys = {record.key for record in layers.values() if record is not None and record.layer.digest in staying}
    for path in _entries(store, ENVIRONMENTS):
        environment = _loaded(path, EnvironmentRecord)
        if environment is None or not kept_keys.issuperset(environment.layers):
            old.append(_old(ENVIRONMENTS, path, f"environment {path.name[:12]}"))
    for path, layer in layers.items():
        if layer is None or layer.key not in kept_keys:
            old.append(_old(LAYERS, path, f"layer {layer.layer.name if layer else path.name[:12]}"))
    return tuple(entry for entry in old if store.path_of(entry.kind, entry.key).stat().st_mtime <= since)


def _entries(store: LocalStore, kind: str) -> Iterator[Path]:
    folder = store.root / kind
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _images(paths: Iterable[Path]) -> Iterator[ImageRecord]:
    for path in sorted(paths):
        yield load(path, ImageRecord)


def _loaded(path: Path, kind: type[M]) -> M | None:
    """The record of an entry; None where it is damaged, so that nothing needs the entry."""
    try:
        return load(path / STORE_RECORD, kind)
    except ConfigurationError:
        return None


def _old(kind: str, path: Path, name: str) -> Old:
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    return Old(kind=kind, key=path.name, name=name, why="no tag, no lock and no late night needs it", size_bytes=size)
