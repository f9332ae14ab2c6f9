"""Layers of bases are kept once, and each is compared with what its image states."""

import pytest
from helpers.errors import error_of
from helpers.layer_tars import file, layer

from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.oci.files import FolderFiles
from envbuild.oci.models import LAYER_TYPES, BaseConfig, Descriptor
from envbuild.oci.pull import FoundImage, find_image, keep_layers
from envbuild.rootfs.layer import LAYER_TYPE
from envbuild.rootfs.single_layer import content_of
from envbuild.store.local import LocalStore


@pytest.fixture
def keep(tmp_path):
    """Keeps the one layer of a layout, under a media type."""
    blob = layer(tmp_path, file("etc/x", b"content"))
    digest, size = sha256_file(blob.file), blob.file.stat().st_size
    diff_id = content_of(blob).diff_id
    blobs = tmp_path / "layout/blobs/sha256"
    blobs.mkdir(parents=True)
    blob.file.rename(blobs / digest.removeprefix("sha256:"))
    store = LocalStore(tmp_path / "store", SilentReporter())

    def run(name, media_type):
        descriptor = Descriptor(mediaType=media_type, digest=digest, size=size)
        image = FoundImage(name="x", digest="", config=BaseConfig(), layers=((descriptor, diff_id),))
        into = tmp_path / name
        into.mkdir()
        return keep_layers(FolderFiles(tmp_path / "layout"), image, store, into)

    return run


@pytest.mark.parametrize("opening", [b"[", b'{"manifests":['])
def test_a_manifest_that_is_nested_too_deeply_is_refused(tmp_path, opening):
    raw = opening * 50_000
    digest = sha256_bytes(raw)
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    (tmp_path / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(raw)
    with pytest.raises(CheckRefusedError, match="is refused as a base"):
        find_image(FolderFiles(tmp_path), digest, "linux/amd64")


def test_wrong_media_type_is_refused_for_new_and_for_stored_layers(keep):
    for number, (media_type, shipped) in enumerate(reversed(LAYER_TYPES.items())):  # one that is refused comes first
        for name in ("first", "again"):
            if media_type.endswith("gzip"):
                (kept,) = keep(f"{name}-{number}", media_type)
                assert kept.record.media_type == shipped
            else:
                error = error_of(CheckRefusedError, keep, f"{name}-{number}", media_type)
                assert f"media type {media_type} states" in error.why


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: bytes(len(good)),
        lambda good: good[:-20],
        lambda good: good + b"x" * 20,
        lambda good: good[:9] + bytes([good[9] ^ 1]) + good[10:],
    ],
    ids=["other", "short", "long", "packed by another system"],
)
def test_a_layer_that_is_not_what_is_stated_is_refused_and_not_kept(keep, tmp_path, damage):
    (file,) = (tmp_path / "layout/blobs/sha256").iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    with pytest.raises(CheckRefusedError):
        keep("bad", LAYER_TYPE)
    assert list((tmp_path / "store").glob("base-layers/*")) == []
    file.write_bytes(good)
    assert len(keep("good", LAYER_TYPE)) == 1
