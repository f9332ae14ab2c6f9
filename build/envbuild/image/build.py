"""From a lock to an image in the store, without a docker daemon or a registry.

The base, the environment's layers and the configuration are kept or made one by one; all but the last lie in the store
under the key of what decides their bytes. An image is their OCI layout, made of hard links, and the .sqsh packed from
the same layers.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from envbuild.catalog.base import Mmdebstrap
from envbuild.catalog.context import Context
from envbuild.catalog.fields import Device
from envbuild.core import locks
from envbuild.core.digests import short
from envbuild.core.errors import MachineError
from envbuild.core.files import write_atomic
from envbuild.image.base import StoredBase, base_key, check_tools, find_base, make_base
from envbuild.image.base.locked import can_be_taken, find_locked, is_locked, refuse_rebuilt, take_locked
from envbuild.image.checks.rules import check_image
from envbuild.image.finalize import image_contents, make_record, pack_sqsh, write_oci, write_reports
from envbuild.image.inputs import ImageInputs, ImageParts, check_inputs, image_key
from envbuild.image.layers.environment import make_environment
from envbuild.image.layers.sandbox import builder_paths
from envbuild.image.record import ImageRecord
from envbuild.image.scan.scan import scan_stored
from envbuild.image.squashfs.pack import check_base, find_mksquashfs
from envbuild.lock.lockfile import LOCKFILES
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.store.record import RECORD_FILE, dump, load
from envbuild.wheels.plan import buildable

KIND = "images"


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the store: its entry, its record, and whether this call made it."""

    path: Path
    record: ImageRecord
    built: bool


class BaseChoice(Enum):
    """Which base an image is built on: the lock's own where it can be had, that or none, or one made anew."""

    USUAL = "usual"
    LOCKED = "locked"
    ANEW = "anew"


def build_image(inputs: ImageInputs, context: Context, choice: BaseChoice = BaseChoice.USUAL) -> BuiltImage:
    """The image of a lock for a target; made when the store does not have it.

    Raises:
        ConfigurationError: the lock is for another base, or the machine has no sources for the base.
        MachineError: a tool is missing, namespaces are forbidden, or the disk is full.
        BuildError: a step failed.
        CheckRefusedError: the environment is not what was locked, or does not import; a check refuses the image; the
            lock's own base cannot be had, and no other will do.
        NetworkError: the package archive or an index cannot be reached.
    """
    check_inputs(inputs)
    if choice is not BaseChoice.ANEW and (kept := _find(inputs, context, choice)):
        return kept
    _check_machine(inputs, context, choice)
    with hold_base(inputs, context, choice) as base:
        # Not when it is packed: the environment would have been made in vain.
        if inputs.with_sqsh:
            check_base(base.record.config)
        environment = make_environment(inputs.environment(base), context)
        parts = ImageParts(inputs=inputs, base=base, environment=environment)
        key = image_key(inputs, base.digest)
        entry = context.store.get_or_build(KIND, key, lambda folder: _make(folder, key, parts, context))
    return _for_inputs(inputs, entry.path, base, built=entry.built)


def _make(folder: Path, key: str, parts: ImageParts, context: Context) -> None:
    """Fill a store entry: OCI layout, scans, checks, .sqsh, SBOMs and record."""
    log = context.store.root / "logs" / f"image-{short(key)}.log"
    # Tools append to a log that is there (core.process): this one is of this attempt alone.
    log.unlink(missing_ok=True)
    image = write_oci(folder, parts, context)
    paths = builder_paths(context.store)
    scans = tuple(scan_stored(layer, paths, context.store) for layer in image.layers)
    # Before the .sqsh, which takes longer than the checks: a refused image is not packed.
    checks = check_image(image_contents(parts, image.config, scans), parts.inputs.allow, context.reporter)
    sqsh = pack_sqsh(folder, parts, image, context, log)
    # The reports are made from the record, and the record is written with their digests.
    record = make_record(key, parts, image, sqsh, checks)
    reports = write_reports(folder, parts, record, scans)
    write_atomic(folder / RECORD_FILE, dump(record.model_copy(update={"reports": reports})))


def _find(inputs: ImageInputs, context: Context, choice: BaseChoice) -> BuiltImage | None:
    """The finished image in the store; one with a .sqsh that the nodes can read also serves where none is wanted."""
    base = _known_base(inputs, context, choice)
    if base is None:
        return None
    store = context.store
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
            return _for_inputs(inputs, path, base, built=False)
    return None


def _known_base(inputs: ImageInputs, context: Context, choice: BaseChoice) -> StoredBase | None:
    """The base to build on, as far as the store has it."""
    selection, lock = inputs.selection, inputs.lock.lock
    if base := find_locked(selection, lock, context.store):
        return base
    if choice is BaseChoice.LOCKED or can_be_taken(selection, lock, context.site):
        return None
    return find_base(selection.base, context.store)


def _check_machine(inputs: ImageInputs, context: Context, choice: BaseChoice) -> None:
    """Before any work: refuse what this machine cannot make."""
    base = _known_base(inputs, context, choice)
    made_anew = choice is BaseChoice.ANEW or base is None
    check_tools(inputs.selection.base, inputs.selection.base_name, made_anew=made_anew)
    if inputs.with_sqsh:
        find_mksquashfs()
    if base is None:
        # The environment needs torch's build; a base takes a minute.
        locked_torch(context.site, inputs.lock.lock)
    if missing := missing_wheels(inputs):
        context.reporter.note(missing)


def missing_wheels(inputs: ImageInputs) -> str:
    """A note about packages that would be compiled in a base without a CUDA toolkit; empty where there are none.

    Not a refusal: a project's base can bring a compiler, and not every such package needs one.
    """
    selection, lock = inputs.selection, inputs.lock
    names = [name for name in buildable(lock) if name not in inputs.wheels]
    is_bare = selection.base.cuda is not None and isinstance(selection.base.obtain, Mmdebstrap)
    if not (names and is_bare and selection.target.device is Device.CUDA):
        return ""
    words = ["envbuild", "wheels", "--stack", selection.stack_name, "--base", selection.base_name]
    words += ["--target", selection.target_name]
    folder = lock.path.parent
    words += ["--name", folder.name] if folder.parent.name == LOCKFILES and folder.name != selection.stack_name else []
    return (
        f"note: the wheelhouse has no wheel of {', '.join(names)}: compiled inside base {selection.base_name}, which "
        f"has no CUDA toolkit unless its file names one. Compile on this machine first: {shlex.join(words)}"
    )


@contextlib.contextmanager
def hold_base(inputs: ImageInputs, context: Context, choice: BaseChoice = BaseChoice.USUAL) -> Iterator[StoredBase]:
    """The base that a lock was verified on, else that of its definition; no other process replaces it meanwhile.

    A base is a directory that sandboxes run in: making it anew waits for them before it replaces the directory.

    Raises:
        CheckRefusedError: the lock's own base cannot be had, and no other will do.
    """
    selection, lock = inputs.selection, inputs.lock.lock
    store, reporter = context.store, context.reporter
    in_use = store.root / "locks" / f"in-use-{short(base_key(selection.base))}.lock"
    waiting = f"another envbuild works with base {selection.base_name}: waiting for it"
    if choice is BaseChoice.ANEW:
        # Let go before the shared lock is taken: flock(2) does not turn one into the other without a gap.
        with locks.exclusive(in_use, on_wait=lambda: reporter.note(waiting)):
            make_base(selection, context, refresh=True)
    with locks.shared(in_use, on_wait=lambda: reporter.note(waiting)):
        base = None if choice is BaseChoice.ANEW else take_locked(selection, lock, context)
        if base is None and choice is BaseChoice.LOCKED:
            raise refuse_rebuilt(selection, lock)
        if base is None and lock.base_image:
            reporter.note(f"base {selection.base_name} is built from its definition: the lock was verified on another")
        yield base or make_base(selection, context)


def _for_inputs(inputs: ImageInputs, path: Path, base: StoredBase, *, built: bool) -> BuiltImage:
    """An image of the store, which may have been built for another target of the same hardware, or another lock."""
    record = load(path / RECORD_FILE, ImageRecord)
    rebuilt = not is_locked(base, inputs.lock.lock, inputs.selection.base.platform)
    own = {"target": inputs.selection.target_name, "base_rebuilt": rebuilt}
    return BuiltImage(path=path, record=record.model_copy(update=own), built=built)
