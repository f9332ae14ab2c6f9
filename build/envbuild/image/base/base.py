"""A base in the store: a root file system to run in, its layers, and the record of both."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from envbuild.catalog.base import Base, Mmdebstrap, PythonSource
from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core import sandbox
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.image.base import apt, facts, imported, mmdebstrap, standalone
from envbuild.image.base.imported import ImportedBase
from envbuild.image.record import BaseRecord
from envbuild.oci.models import BaseConfig, RunConfig
from envbuild.oci.pull import FoundImage
from envbuild.oci.write import LAYER_OF, OciImage, make_oci
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.layer_writer import EPOCH
from envbuild.rootfs.unpack import unpack
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump, load

KIND = "bases"
# Raised when a base made from the same inputs would come out differently.
FORMAT = 3
ROOTFS = mmdebstrap.ROOTFS
LAYERS = "layers"
# Where an environment will be.
OWN_PLACE = "opt/envbuild"
# Files that a sandbox mounts the machine's own over. They are not in a layer.
MOUNT_POINTS = ("etc/resolv.conf", "etc/hosts")
MOUNT_FOLDERS = ("etc", "opt")


@dataclass(frozen=True, kw_only=True)
class StoredBase:
    """A base in the store."""

    path: Path
    record: BaseRecord

    @property
    def rootfs(self) -> Path:
        """The root file system as a directory; owners in it mean nothing."""
        return self.path / ROOTFS

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its layers, lowest first."""
        return tuple(Layer(record, layer_file(self.path, record)) for record in self.record.layers)

    @property
    def digest(self) -> str:
        """The digest by which what is built on it knows the base.

        That of its layers' tars (OCI image-spec, "ChainID": of a single layer its own), and of its configuration where
        it has one, since images carry that on.
        """
        chain = chain_id(self.record.layers)
        if self.record.config == BaseConfig():
            return chain
        return digest_of({"layers": chain, "config": self.record.config.model_dump(mode="json")})


def layer_file(entry: Path, layer: LayerRecord) -> Path:
    """The file of a base's layer."""
    return entry / LAYERS / layer.digest.removeprefix("sha256:")


def chain_id(layers: tuple[LayerRecord, ...]) -> str:
    """The digest of layers one upon the other."""
    # image-spec, config.md, "Layer ChainID".
    chain = layers[0].diff_id
    for layer in layers[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {layer.diff_id}'.encode()).hexdigest()}"
    return chain


def base_key(base: Base) -> str:
    """The key of a base: what it is defined as and what makes it, but not the day on which it is made."""
    # Without the day: an existing base serves all who lock on it until --refresh-base; its packages are in its record.
    own = mmdebstrap.inputs() if isinstance(base.obtain, Mmdebstrap) else {"gzip": gzip_writer.ENCODER}
    return digest_of({"format": FORMAT, "definition": definition_digest(base), **own, **standalone.inputs(base)})


def find_base(base: Base, store: LocalStore) -> StoredBase | None:
    """The base as it was made last, if it was."""
    path = store.find(KIND, base_key(base))
    return read_base(path) if path else None


def check_tools(base: Base, name: str, *, made_anew: bool) -> None:
    """Refuse to begin where a base cannot be made or used.

    Raises:
        MachineError: a program is missing, this account may not do it, or the base's programs do not run here.
    """
    facts.require_machine(base, name)
    if isinstance(base.obtain, Mmdebstrap):
        mmdebstrap.require_tools()
        # Only mmdebstrap itself maps IDs; a base in the store runs with one.
        if os.geteuid() and made_anew:
            mmdebstrap.require_subids()
    sandbox.probe()


def make_base(selection: Selection, context: Context, *, refresh: bool = False) -> StoredBase:
    """The base of ``selection``; made when it is not in the store, or when ``refresh`` asks for it anew.

    Raises:
        ConfigurationError: this machine has no apt sources for it, or its file or folder is not there.
        NetworkError: the archive or the registry cannot be reached.
        CheckRefusedError: it is not what its digest or its file states.
        BuildError: mmdebstrap failed.
    """
    selection.base.refuse_unresolved(selection.base_name)
    key = base_key(selection.base)
    store = context.store

    def build(folder: Path) -> None:
        # One moment for both: a lock names it, and a mirror's snapshot of it has the same packages (locked.py).
        now = context.clock()
        complete(folder, obtain(folder, selection, context, at=now), selection, context, made_at=now)

    entry = store.rebuild(KIND, key, build) if refresh else store.get_or_build(KIND, key, build)
    return read_base(entry.path)


def read_base(path: Path) -> StoredBase:
    """The base of a store entry."""
    return StoredBase(path=path, record=load(path / RECORD_FILE, BaseRecord))


def obtain(folder: Path, selection: Selection, context: Context, *, at: datetime) -> ImportedBase:
    """Make the base of a selection, or take it from where its file says: its root file system in ``folder``.

    Args:
        at: which packages a mirror of snapshots gives.

    Raises:
        EnvbuildError: see :func:`make_base`.
    """
    base, name = selection.base, selection.base_name
    rootfs = folder / ROOTFS
    log = context.store.root / "logs" / f"base-{name}-{short(base_key(base))}.log"
    log.unlink(missing_ok=True)
    python = None
    if base.python.source is PythonSource.STANDALONE:
        # First: it takes seconds to know that it cannot be had, and the distribution takes minutes.
        python = standalone.download(folder.parent, base, name, log, context.reporter)
    if isinstance(base.obtain, Mmdebstrap):
        mirror = apt.at_moment(base, context.site.apt_mirror, at)
        layer = mmdebstrap.build(folder, base, name, mirror, log, context.reporter)
        imported_base = ImportedBase(layers=[layer], config=BaseConfig(), made_by=mmdebstrap.mmdebstrap_version())
    else:
        # Of .../envs/bases/NAME.toml the folder that holds envs/: paths in the file are relative to it.
        root = selection.catalog.path("bases", name).parents[2]
        imported_base = imported.import_base(folder, base, name, root, context)
        rootfs.mkdir()
        with context.reporter.step(f"unpack base {name}"):
            unpack([layer.blob for layer in imported_base.layers], rootfs)
    if python is not None:
        added = standalone.add_python(python, rootfs, base, name, log, context.reporter)
        layers, made_by = [*imported_base.layers, added.layer], f"{imported_base.made_by}, {added.made_by}"
        imported_base = replace(imported_base, layers=layers, made_by=made_by)
    return imported_base


def complete(
    folder: Path,
    imported_base: ImportedBase,
    selection: Selection,
    context: Context,
    *,
    made_at: datetime | None = None,
) -> None:
    """Make a store entry of what was obtained: its layers, its record, and files to mount on in its root file system.

    Raises:
        CheckRefusedError: it is not what its file says, or has an environment already.
    """
    base, name, rootfs = selection.base, selection.base_name, folder / ROOTFS
    for layer in imported_base.layers:
        # A base of the same layer twice has one file for both.
        place = layer_file(folder, layer.record)
        place.parent.mkdir(exist_ok=True)
        layer.file.replace(place)
    _refuse_environment(rootfs, name)
    _make_mount_points(rootfs, name)
    with context.reporter.step(f"compare base {name} with its file"):
        facts.check(base, name, rootfs, imported_base.config.environment)
    record = BaseRecord(
        layers=tuple(layer.record for layer in imported_base.layers),
        made_by=imported_base.made_by,
        name=imported_base.name,
        digest=imported_base.digest,
        config=imported_base.config,
        packages=facts.packages_of(rootfs),
        made_at=made_at.strftime(MOMENT_FORMAT) if made_at else "",
    )
    write_atomic(folder / RECORD_FILE, dump(record))


def _refuse_environment(rootfs: Path, name: str) -> None:
    if (rootfs / OWN_PLACE).exists() or (rootfs / OWN_PLACE).is_symlink():
        raise CheckRefusedError(
            f"base {name} has something at /{OWN_PLACE}, where environments are put",
            why="It is an image that envbuild made, or is made from one: two environments would lie in one another.",
            fix="Take what that image was made on as the base.",
        )


def _make_mount_points(rootfs: Path, name: str) -> None:
    """Plain files for the sandbox to mount on, in real directories: a link could lead out of the root."""
    for place in MOUNT_FOLDERS:
        folder = rootfs / place
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise CheckRefusedError(
                f"/{place} of base {name} is not a directory",
                why="It is a link." if folder.is_symlink() else "It is something else.",
                fix="Take an image of a distribution as the base.",
            )
        with machine_errors(folder):
            folder.mkdir(exist_ok=True)
    for place in MOUNT_POINTS:
        file = rootfs / place
        with machine_errors(file):
            # systemd-resolved makes /etc/resolv.conf a link into /run; a mount over it would go where it leads.
            if file.is_symlink():
                file.unlink()
            file.touch()


MADE_BY = "org.envbuild.base.made-by"
# What the base is itself made from (OCI image-spec, annotations.md).
NAME, DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"


def base_image(record: BaseRecord, platform: str) -> OciImage:
    """The image that a base is; the same for the same layers and record."""
    config = record.config
    run = RunConfig(
        environment=tuple(f"{name}={value}" for name, value in config.environment.items()),
        entrypoint=config.entrypoint,
        workdir=config.workdir,
        labels=tuple(config.labels.items()),
        volumes=config.volumes,
        user=config.user,
        ports=config.ports,
        stop_signal=config.stop_signal,
    )
    stated = {MADE_BY: record.made_by, NAME: record.name, DIGEST: record.digest}
    return make_oci(run, platform, record.layers, EPOCH, {key: value for key, value in stated.items() if value})


def base_tag(name: str, digest: str) -> str:
    """The tag of a published base."""
    return f"base-{name}-{digest.removeprefix('sha256:')[:12]}"


def taken_again(image: FoundImage, layers: list[Layer]) -> ImportedBase:
    """The base that an image is, with the names and sources that it had where it was made.

    Args:
        layers: of the image, lowest first.
    """
    annotations = image.annotations
    named = [
        Layer(layer.record.model_copy(update={"name": stated.removeprefix(LAYER_OF) or layer.record.name}), layer.file)
        for layer, stated in zip(layers, image.history, strict=True)
    ]
    return ImportedBase(
        layers=named,
        config=image.config,
        made_by=annotations.get(MADE_BY, image.name),
        name=annotations.get(NAME, ""),
        digest=annotations.get(DIGEST, ""),
    )
