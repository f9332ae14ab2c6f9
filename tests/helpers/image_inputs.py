"""What the image of a small lock on debian12 is made from, without building anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.locks import make_lock

from envbuild.catalog.catalog import Catalog, HostDistribution, definition_digest, select
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.core.files import write_atomic
from envbuild.image.base import KIND, StoredBase, base_key
from envbuild.image.inputs import ImageInputs, ImageParts
from envbuild.image.layers.environment import StoredEnvironment
from envbuild.image.record import BaseRecord, EnvironmentRecord
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.oci.models import BaseConfig
from envbuild.rootfs.layer import LayerRecord
from envbuild.store.record import RECORD_FILE, dump

SELECTION = select(Catalog.open(data_root()), "mcore", "cpu", "debian12", HostDistribution("debian", "12"))
BASE_DIGEST = "sha256:base"
LAYER = LayerRecord(name="base", digest="d", diff_id=BASE_DIGEST, size_bytes=1, unpacked_bytes=1, entries=1)


def small_lock(folder: Path) -> LockDirectory:
    """A lock that is for debian12 as it is defined."""
    make_lock(folder)
    directory = read_lock(folder)
    base = directory.lock.base.model_copy(update={"definition_digest": definition_digest(SELECTION.base)})
    return changed(directory, base=base)


def changed(lock: LockDirectory, **fields: Any) -> LockDirectory:
    return LockDirectory(lock.path, lock.lock.model_copy(update=fields))


def inputs_of(lock: LockDirectory, **more: Any) -> ImageInputs:
    return ImageInputs(**{"selection": SELECTION, "lock": lock, **more})


def base_record(config: BaseConfig | None = None) -> BaseRecord:
    return BaseRecord(
        schema="envbuild.base/2",
        layers=(LAYER,),
        made_by="mmdebstrap 1.3.5",
        config=config or BaseConfig(),
        packages={},
    )


def put_base(context: Context, record: BaseRecord, key: str = "") -> None:
    """Have a base in the store: under the key of debian12's definition, or another one."""
    key = key or base_key(SELECTION.base)
    context.store.get_or_build(KIND, key, lambda folder: write_atomic(folder / RECORD_FILE, dump(record)))


def parts_of(inputs: ImageInputs, config: BaseConfig | None = None) -> ImageParts:
    environment = EnvironmentRecord(schema="envbuild.environment/2", layers=(), packages={})
    return ImageParts(
        inputs=inputs,
        base=StoredBase(path=Path("/b"), record=base_record(config)),
        environment=StoredEnvironment(record=environment, layers=()),
    )
