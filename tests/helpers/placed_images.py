"""An image made of a few bytes, placed in a project's folder as `envbuild image` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unit.image.test_record import RECORD

from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.image.output import OCI_DIR, SQSH_FILE, PlacedImage, image_path
from envbuild.image.record import SqshRecord
from envbuild.image.sbom.reports import Attachment, attach
from envbuild.lock.lockfile import LockDirectory
from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.store import entry_index
from envbuild.store.record import RECORD_FILE, dump

ONE_LAYER = {"base": b"a layer"}


def place_image(
    out_dir: Path,
    lock: LockDirectory,
    name: str = "mcore",
    *,
    layers: Mapping[str, bytes] = ONE_LAYER,
    sboms: Sequence[Attachment] = (),
) -> PlacedImage:
    """An OCI layout, a .sqsh made of the same bytes, and their record, sealed as in the store."""
    path = image_path(out_dir, name, "debian12", "cpu")
    path.mkdir(parents=True, exist_ok=True)
    made = []
    for layer_name, content in layers.items():
        file = path.parent / f"layer-{layer_name}"
        file.write_bytes(content)
        record = LayerRecord(
            name=layer_name,
            digest=sha256_bytes(content),
            diff_id=sha256_bytes(content + b"tar"),
            size_bytes=len(content),
            unpacked_bytes=len(content),
            entries=1,
        )
        made.append(Layer(record, file))
    image = make_oci(RunConfig(), "linux/amd64", [layer.record for layer in made], 1)
    write_layout(path / OCI_DIR, image, made, tag="mcore")
    for layer in made:
        layer.file.unlink()
    sqsh = path / SQSH_FILE
    sqsh.write_bytes(b"squashfs of " + b"".join(layers.values()))
    record = RECORD.model_copy(
        update={
            "lock_digest": lock.lock.digest,
            "oci_digest": image.digest,
            "config_digest": image.config_digest,
            "layers": tuple(layer.record for layer in made),
            "base_rebuilt": False,
            "base_digest": sha256_bytes(b"base"),
            "sqsh": SqshRecord(
                digest=sha256_file(sqsh),
                size_bytes=sqsh.stat().st_size,
                packed_by="mksquashfs 4.5.1",
                compression="zstd",
            ),
            "reports": attach(path / OCI_DIR, path, sboms, "1970-01-01T00:00:01Z") if sboms else (),
        }
    )
    (path / RECORD_FILE).write_bytes(dump(record))
    entry_index.write_index(path)
    return PlacedImage(path, record, name)
