"""Records: read back as written, and refused when damaged."""

import pytest
from helpers.errors import error_of

from envbuild.core.errors import ConfigurationError
from envbuild.image.record import ImageRecord, SqshRecord
from envbuild.rootfs.layer import LayerRecord
from envbuild.store.record import dump, load

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


def test_record_is_read_back_as_written(tmp_path):
    file = tmp_path / "record.json"
    file.write_bytes(dump(RECORD))
    assert load(file, ImageRecord) == RECORD
    assert b'"schema": "envbuild.image/1"' in dump(RECORD)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"schema": "envbuild.image/2"}'])
def test_error_for_a_damaged_record_has_help(tmp_path, text):
    file = tmp_path / "record.json"
    file.write_text(text)
    assert "envbuild image" in error_of(ConfigurationError, load, file, ImageRecord).fix
