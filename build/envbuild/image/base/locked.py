"""The base that a lock was verified on, by the digest of its image: in the store, published, or of a mirror's snapshot.

A mirror of snapshots has the packages of a moment: the site's ``apt_mirror`` with ``{snapshot}`` in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from envbuild.catalog.base import Mmdebstrap
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.fields import moment_of
from envbuild.catalog.site import Site
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.image.base import apt
from envbuild.image.base.base import (
    KIND,
    ROOTFS,
    StoredBase,
    base_image,
    base_key,
    base_tag,
    complete,
    find_base,
    obtain,
    read_base,
    taken_again,
)
from envbuild.image.record import BaseRecord
from envbuild.lock.models import Lock
from envbuild.oci.pull import find_image, keep_layers
from envbuild.oci.registry import RegistrySource
from envbuild.rootfs.unpack import unpack
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, load


def is_locked(base: StoredBase, lock: Lock, platform: str) -> bool:
    """Whether it is the base that the lock names."""
    return bool(lock.base_image) and base_image(base.record, platform).digest == lock.base_image


def find_locked(selection: Selection, lock: Lock, store: LocalStore) -> StoredBase | None:
    """The base that the lock names, if the store has it."""
    if not lock.base_image:
        return None
    # The base that was made here last may be it. Any other lies under a key of its own, where a refresh leaves it.
    made = find_base(selection.base, store)
    if made is not None and is_locked(made, lock, selection.base.platform):
        return made
    path = store.find(KIND, _key(selection, lock))
    return read_base(path) if path else None


def can_be_taken(selection: Selection, lock: Lock, site: Site) -> bool:
    """Whether there is a place that may have the base which the lock names."""
    return bool(lock.base_image) and bool(site.base_repositories or _has_snapshots(selection, lock, site))


def take_locked(selection: Selection, lock: Lock, context: Context) -> StoredBase | None:
    """The base that the lock names; None where no place has it, which is said.

    Raises:
        CheckRefusedError: what is there under its digest is damaged, or no base for the stack.
        MachineError: the disk is full.
    """
    if base := find_locked(selection, lock, context.store):
        return base
    tries: list[Callable[..., None]] = [partial(_pull, repository=name) for name in context.site.base_repositories]
    if _has_snapshots(selection, lock, context.site):
        tries.append(_make_again)
    return next(filter(None, (_tried(one, selection, lock, context) for one in tries)), None)


def _tried(build: Callable[..., None], selection: Selection, lock: Lock, context: Context) -> StoredBase | None:
    """The base from one place; None where it is not there, which is said."""
    fill = partial(build, selection=selection, lock=lock, context=context)
    try:
        # An error in it keeps the folder out of the store: no base stays there under the digest of another.
        entry = context.store.get_or_build(KIND, _key(selection, lock), fill)
    except (NetworkError, _OtherBaseError) as error:
        said = f"{error.what}. {error.why}" if isinstance(error, NetworkError) else str(error)
        context.reporter.note(f"base {selection.base_name} as it was verified cannot be had: {said}")
        return None
    return read_base(entry.path)


class _OtherBaseError(Exception):
    """Why a base that was made again is not the one that was wanted."""


def _key(selection: Selection, lock: Lock) -> str:
    return digest_of({"base": base_key(selection.base), "image": lock.base_image})


def _has_snapshots(selection: Selection, lock: Lock, site: Site) -> bool:
    made = isinstance(selection.base.obtain, Mmdebstrap)
    return made and bool(lock.base_made_at) and apt.SNAPSHOT in (site.apt_mirror or "")


def _pull(folder: Path, *, repository: str, selection: Selection, lock: Lock, context: Context) -> None:
    platform = selection.base.platform
    # Only the address: the image is asked for by its digest, whatever the tag names now.
    source = RegistrySource(
        f"{repository}:{base_tag(selection.base_name, lock.base_image)}", context.site.ca_bundle, os.environ
    )
    with context.reporter.step(f"take base {selection.base_name} from {repository}"):
        image = find_image(source, lock.base_image, platform)
        base = taken_again(image, keep_layers(source, image, context.store, folder))
        (folder / ROOTFS).mkdir()
        unpack([layer.blob for layer in base.layers], folder / ROOTFS)
    complete(folder, base, selection, context)


def _make_again(folder: Path, *, selection: Selection, lock: Lock, context: Context) -> None:
    complete(folder, obtain(folder, selection, context, at=moment_of(lock.base_made_at)), selection, context)
    digest = base_image(load(folder / RECORD_FILE, BaseRecord), selection.base.platform).digest
    if digest != lock.base_image:
        raise _OtherBaseError(f"from the snapshot of {lock.base_made_at} it is {short(digest)}")


def refuse_rebuilt(selection: Selection, lock: Lock) -> CheckRefusedError:
    """The error where only the lock's own base will do, and no place has it."""
    if not lock.base_image:
        return CheckRefusedError(
            f"the lock names no image of base {selection.base_name}",
            why="It was not verified on the base itself.",
            fix="Verify it there: envbuild lock --verify. Or leave --locked-base out.",
        )
    return CheckRefusedError(
        f"base {selection.base_name} as it was when the lock was verified cannot be had",
        why=f"Its image is {lock.base_image}. Neither the store nor a repository of bases has it.",
        fix="Name the repository in base_repositories of the site configuration, or ENVBUILD_BASE_REPOSITORIES; where "
        "the base still is, publish it: envbuild publish --base NAME --to HOST/REPOSITORY. Or leave --locked-base out.",
    )
