"""From a lock to an image in the store, without a docker daemon or a registry.

The base, the environment's layers and the configuration are kept or made one by one; all but the last lie in the store
under the key of what decides their bytes. An image is their OCI layout, made of hard links, and the .sqsh packed from
the same layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.digests import short
from envbuild.core.errors import MachineError
from envbuild.core.files import write_atomic
from envbuild.image.base import StoredBase, base_key, check_tools, find_base, make_base
from envbuild.image.checks.check import check_image
from envbuild.image.finalize import image_contents, make_record, pack_sqsh, write_oci, write_reports
from envbuild.image.inputs import ImageInputs, ImageParts, check_inputs, image_key
from envbuild.image.layers.environment import make_environment
from envbuild.image.layers.sandbox import builder_paths
from envbuild.image.record import ImageRecord
from envbuild.image.scan.cache import scan_layer
from envbuild.image.squashfs.pack import check_base, find_mksquashfs
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.rootfs.single_layer import members_of
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump

KIND = "images"


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the store: its entry, its record, and whether this call made it."""

    path: Path
    record: ImageRecord
    built: bool


def build_image(inputs: ImageInputs, context: Context, *, refresh_base: bool = False) -> BuiltImage:
    """The image of a lock for a target; made when the store does not have it.

    Args:
        refresh_base: make the base anew from the distribution's current packages, and then what follows from it.

    Raises:
        ConfigurationError: the lock is for another base, or the machine has no sources for the base.
        MachineError: a tool is missing, namespaces are forbidden, or the disk is full.
        BuildError: a step failed.
        CheckRefusedError: the environment is not what was locked, or does not import; a check refuses the image.
        NetworkError: the package archive or an index cannot be reached.
    """
    check_inputs(inputs)
    if not refresh_base and (found := _find(inputs, context.store)):
        return found
    _check_machine(inputs, context, refresh_base=refresh_base)
    with hold_base(inputs.selection, context, refresh=refresh_base) as base:
        if inputs.with_sqsh:
            check_base(base.record.config)
        environment = make_environment(inputs.environment(base), context)
        parts = ImageParts(inputs=inputs, base=base, environment=environment)
        key = image_key(inputs, base.digest)
        entry = context.store.get_or_build(KIND, key, lambda folder: _make(folder, key, parts, context))
    return _for_target(inputs.selection, entry.path, built=entry.built)


def _make(folder: Path, key: str, parts: ImageParts, context: Context) -> None:
    """Fill a store entry: OCI layout, scans, checks, .sqsh, SBOMs and record."""
    log = context.store.root / "logs" / f"image-{short(key)}.log"
    log.unlink(missing_ok=True)
    image = write_oci(folder, parts, context)
    paths = builder_paths(context.store)
    scans = tuple(
        scan_layer(record.name, record.digest, partial(members_of, record.blob(file)), paths, context.store)
        for record, file in image.layers
    )
    # Before the .sqsh, which takes longer than the checks: a refused image is not packed.
    checks = check_image(image_contents(parts, image.config, scans), parts.inputs.allow, context.reporter)
    sqsh = pack_sqsh(folder, parts, image, context, log)
    record = make_record(key, parts, image, sqsh, checks)
    reports = write_reports(folder, parts, record, scans)
    write_atomic(folder / RECORD_FILE, dump(record.model_copy(update={"reports": reports})))


def _find(inputs: ImageInputs, store: LocalStore) -> BuiltImage | None:
    """The finished image in the store; one with a .sqsh that the nodes can read also serves where none is wanted."""
    base = find_base(inputs.selection.base, store)
    if base is None:
        return None
    candidates = [inputs]
    if not inputs.with_sqsh and inputs.packing.is_readable:
        # An image with a .sqsh has the same OCI layout.
        candidates.insert(0, replace(inputs, with_sqsh=True))
    for candidate in candidates:
        try:
            key = image_key(candidate, base.digest)
        except MachineError:
            if inputs.with_sqsh:
                raise
            continue  # without mksquashfs, images with a .sqsh have no key here
        if path := store.find(KIND, key):
            return _for_target(inputs.selection, path, built=False)
    return None


def _check_machine(inputs: ImageInputs, context: Context, *, refresh_base: bool) -> None:
    """Before any work: refuse what this machine cannot make."""
    base = find_base(inputs.selection.base, context.store)
    check_tools(inputs.selection.base, inputs.selection.base_name, made_anew=refresh_base or base is None)
    if inputs.with_sqsh:
        find_mksquashfs()
    if base is None:
        # The environment needs torch's build; a base takes a minute.
        locked_torch(context.site, inputs.lock.lock)


@contextlib.contextmanager
def hold_base(selection: Selection, context: Context, *, refresh: bool) -> Iterator[StoredBase]:
    """The base of a selection, which no other process replaces while the block runs.

    A base is a directory that sandboxes run in: a refresh waits for them before it replaces the directory.
    """
    store, reporter = context.store, context.reporter
    in_use = store.root / "locks" / f"in-use-{short(base_key(selection.base))}.lock"
    waiting = f"another envbuild works with base {selection.base_name}: waiting for it"
    if refresh:
        with locks.exclusive(in_use, on_wait=lambda: reporter.note(waiting)):
            make_base(selection, context, refresh=True)
    with locks.shared(in_use, on_wait=lambda: reporter.note(waiting)):
        yield make_base(selection, context)


def _for_target(selection: Selection, path: Path, *, built: bool) -> BuiltImage:
    """An image of the store, which may have been built for another target of the same hardware."""
    record = ImageRecord.load(path / RECORD_FILE)
    return BuiltImage(path=path, record=record.model_copy(update={"target": selection.target_name}), built=built)
