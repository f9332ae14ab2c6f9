"""An image made of a few bytes, placed in a project's folder as `envbuild image` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.image.output import OCI_DIR, SQSH_FILE, PlacedImage, image_path
from envbuild.image.record import ImageRecord, SqshRecord
from envbuild.image.sbom.reports import Attachment, attach
from envbuild.lock.lockfile import LockDirectory
from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.store import entry_index
from envbuild.store.record import RECORD_FILE, dump

LAYER = LayerRecord(name="base", digest="sha256:1", diff_id="sha256:2", size_bytes=3, unpacked_bytes=4, entries=5)
RECORD = ImageRecord(
    schema="envbuild.image/1",
    key="sha256:k",
    stack="mcore",
    base="debian12",
    target="cpu",
    lock_digest="sha256:l",
    source_date_epoch=1,
    oci_digest="sha256:m",
    config_digest="sha256:c",
    layers=(LAYER,),
    sqsh=SqshRecord(digest="sha256:s", size_bytes=1, packed_by="mksquashfs version 4.5.1", compression="-comp zstd"),
    python="/opt/envbuild/venv/bin/python",
    environment=("PATH=/bin",),
    base_digest="sha256:2",
    base_made_by="mmdebstrap 1.3.5",
    base_packages={"libc6": "2.36"},
    packages={"torch": "2.13.0"},
    uv="0.13.8",
    gzip="zlib 1.2.13 level 4",
)


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
