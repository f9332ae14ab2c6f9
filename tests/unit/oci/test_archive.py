"""Tars that no base can be made of: errors name files that users know, not temporary ones."""

import gzip
import json

import pytest
from helpers.errors import error_of
from helpers.layer_tars import file, tar_of

from envbuild.core.errors import CheckRefusedError
from envbuild.oci.archive import docker_archive, rootfs
from envbuild.oci.files import FolderFiles
from envbuild.oci.index import only_digest

PLATFORM = "linux/amd64"
HALF = tar_of([file("a", bytes(5000))])[:3000]


def saved(tmp_path, images, layer=HALF, diff_id="sha256:" + "0" * 64):
    config = {"os": "linux", "architecture": "amd64", "config": {}, "rootfs": {"diff_ids": [diff_id]}}
    path = tmp_path / "saved.tar"
    documents = {"manifest.json": images, "config.json": config}
    items = [file(name, json.dumps(data).encode()) for name, data in documents.items()]
    path.write_bytes(tar_of([*items, file("x/layer.tar", layer)]))
    return path


@pytest.fixture
def staging(tmp_path):
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "content",
    [HALF, gzip.compress(HALF, mtime=0), b"<html>" * 200, gzip.compress(HALF, mtime=0)[:50]],
    ids=["cut", "cut, then gzipped", "no tar", "cut gzip"],
)
def test_a_root_file_system_is_called_by_its_tar(tmp_path, staging, content):
    path = tmp_path / "rootfs.tar"
    path.write_bytes(content)
    error = error_of(CheckRefusedError, rootfs, path, staging)
    assert error.what.startswith(f"the tar {path} is refused")
    assert str(staging) not in f"{error.what}{error.why}{error.fix}"


@pytest.mark.parametrize(
    ("layer", "words"), [(HALF, "is refused"), (tar_of([file("a")]), "as a base")], ids=["cut", "another"]
)
def test_a_layer_of_docker_save_is_called_by_its_archive(tmp_path, staging, layer, words):
    path = saved(tmp_path, [{"Config": "config.json", "Layers": ["x/layer.tar"]}], layer)
    with pytest.raises(CheckRefusedError, match=words) as caught:
        docker_archive(path, None, PLATFORM, staging)
    assert caught.value.what.startswith(f"layer base of the archive {path}")
    assert str(staging) not in f"{caught.value.what}{caught.value.why}{caught.value.fix}"


@pytest.mark.parametrize("tag", [None, "x:1"])
def test_archive_without_images_is_refused(tmp_path, staging, tag):
    error = error_of(CheckRefusedError, docker_archive, saved(tmp_path, []), tag, PLATFORM, staging)
    assert error.why == "Its manifest.json lists no image."
    (tmp_path / "index.json").write_text('{"manifests": []}')
    error = error_of(CheckRefusedError, only_digest, FolderFiles(tmp_path), tag)
    assert error.why == "Its index.json lists no image."
