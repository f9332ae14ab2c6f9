"""Blobs of layers: compression, and comparison with what is known about them."""

import gzip
import hashlib
import random

import pytest
from helpers.errors import error_of
from helpers.layer_tars import device, file, seen, tar_of

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.rootfs import blobs
from envbuild.rootfs.blobs import MEDIA_TYPES, LayerBlob, check_blob, check_media_type, open_blob, zstd

TAR = tar_of([file("a", b"1" * 100_000), file("b", random.Random(1).randbytes(30_000))])


def sha256(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def blob_of(tmp_path, data, **known):
    path = tmp_path / "blob"
    path.write_bytes(data)
    return LayerBlob(file=path, **known)


def read(blob):
    return b"".join(open_blob(blob))


SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
PACKED = {
    "plain": TAR,
    "gzip": gzip.compress(TAR),
    "gzip in two members": gzip.compress(TAR[:70_000]) + gzip.compress(TAR[70_000:]),
    "gzip and padding": gzip.compress(TAR) + bytes(700_000),
    "padding between": gzip.compress(TAR[:512]) + bytes(10) + gzip.compress(TAR[512:]),
    "zstd": zstd.compress(TAR),
    "zstd in two frames": zstd.compress(TAR[:70_000]) + zstd.compress(TAR[70_000:]),
    "zstd with a skippable frame": zstd.compress(TAR) + SKIPPABLE,
}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("portion", [1 << 18, 1000, 7])
def test_blobs_are_unpacked(tmp_path, monkeypatch, how, portion):
    monkeypatch.setattr(blobs, "READ_BYTES", portion if portion > 7 or len(PACKED[how]) < 400_000 else 1000)
    data = PACKED[how]
    blob = blob_of(tmp_path, data, digest=sha256(data), size_bytes=len(data), diff_id=sha256(TAR))
    assert read(blob) == TAR


@pytest.mark.parametrize("media_type", sorted(MEDIA_TYPES))
@pytest.mark.parametrize("how", ["plain", "gzip", "zstd"])
@pytest.mark.parametrize("look", [read, check_blob, check_media_type])
def test_a_media_type_that_the_first_bytes_contradict_is_refused(tmp_path, media_type, how, look):
    blob = blob_of(tmp_path, PACKED[how], media_type=media_type, digest=sha256(PACKED[how]))
    if media_type.endswith({"plain": ".tar"}.get(how, how)):
        look(blob)
        return
    with pytest.raises(CheckRefusedError, match="is refused") as caught:
        look(blob)
    assert f"media type {media_type} states" in caught.value.why
    assert caught.value.why.endswith(f"it is {'a plain tar' if how == 'plain' else how}.")


def test_empty_blob_of_a_compressed_type_is_refused(tmp_path):
    error = error_of(
        CheckRefusedError, seen, blob_of(tmp_path, b"", media_type="application/vnd.oci.image.layer.v1.tar+zstd")
    )
    assert "states zstd; by its first bytes it is empty" in error.why
    assert seen(blob_of(tmp_path, b"", media_type="application/vnd.oci.image.layer.v1.tar")) == {}


@pytest.mark.parametrize("data", [b"<html>not found</html>", b"<html>not found</html>" * 100])
def test_unknown_packing_is_not_reported_as_a_wrong_media_type(tmp_path, data):
    error = error_of(
        CheckRefusedError, seen, blob_of(tmp_path, data, media_type="application/vnd.oci.image.layer.v1.tar+gzip")
    )
    assert "media type" not in error.why


@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
        "application/vnd.oci.image.layer.v1.tar+bzip2",
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        "",
    ],
)
def test_unknown_media_types_are_refused(tmp_path, media_type):
    error = error_of(CheckRefusedError, read, blob_of(tmp_path, gzip.compress(TAR), media_type=media_type))
    assert f"media type is {media_type!r}" in error.why


@pytest.mark.parametrize("how", ["plain", "gzip", "zstd"])
def test_a_truncated_blob_is_refused(tmp_path, how):
    data = PACKED[how]
    for length in (10, 600, len(data) // 2, len(data.rstrip(b"\0")) - 3):
        with pytest.raises(CheckRefusedError, match="is refused") as caught:
            seen(blob_of(tmp_path, data[:length]))
        assert any(word in caught.value.why for word in ("ends too early", "ends in the middle", "neither a tar"))


def test_truncated_blob_is_refused_by_its_size_first(tmp_path):
    data = PACKED["gzip"]
    error = error_of(CheckRefusedError, read, blob_of(tmp_path, data[:-10], size_bytes=len(data)))
    assert error.why == f"The manifest states {len(data)} bytes; the blob has {len(data) - 10}."


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_damaged_stream_is_refused(tmp_path, how):
    data = bytearray(PACKED[how])
    data[len(data) // 2] ^= 0x55
    with pytest.raises(CheckRefusedError):
        seen(blob_of(tmp_path, bytes(data), digest=sha256(PACKED[how])))


def test_a_wrong_checksum_at_the_end_of_gzip_is_refused(tmp_path):
    data = bytearray(PACKED["gzip"])
    data[-6] ^= 1
    with pytest.raises(CheckRefusedError, match="is refused") as caught:
        read(blob_of(tmp_path, bytes(data)))
    assert "gzip stream is damaged" in caught.value.why


@pytest.mark.parametrize(("field", "name"), [("digest", "blob"), ("diff_id", "tar in it")])
def test_a_wrong_digest_is_refused(tmp_path, field, name):
    wrong = "sha256:" + "0" * 64
    error = error_of(CheckRefusedError, seen, blob_of(tmp_path, PACKED["gzip"], **{field: wrong}))
    assert f"digest of the {name} should be {wrong} and is sha256:" in error.why


def test_wrong_digest_is_reported_before_the_content(tmp_path):
    data = gzip.compress(tar_of([device("etc/null"), file("b", bytes(3_000_000))]))
    error = error_of(CheckRefusedError, seen, blob_of(tmp_path, data, digest="sha256:" + "0" * 64))
    assert "digest of the blob" in error.why


def test_a_bomb_is_refused_without_being_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "FREE_BYTES", 1 << 20)
    bomb = gzip.compress(tar_of([file("zeros", bytes(40 << 20))]))
    assert len(bomb) * blobs.MAX_RATIO < 40 << 20
    assert "200:1" in error_of(CheckRefusedError, seen, blob_of(tmp_path, bomb)).why


def test_more_than_the_record_states_is_refused(tmp_path):
    assert read(blob_of(tmp_path, PACKED["gzip"], unpacked_bytes=len(TAR))) == TAR
    error = error_of(CheckRefusedError, read, blob_of(tmp_path, PACKED["gzip"], unpacked_bytes=len(TAR) - 1))
    assert "what its record states" in error.why


def test_a_missing_file_is_the_machines_fault(tmp_path):
    with pytest.raises(MachineError, match="gone"):
        read(LayerBlob(file=tmp_path / "gone"))
