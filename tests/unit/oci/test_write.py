"""The OCI layout: every digest is that of the bytes it names."""

import hashlib
import json

import pytest

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import RunConfig
from envbuild.oci.write import docker_manifest, make_oci, write_layout
from envbuild.rootfs.layer import Layer, LayerRecord

CONFIG = RunConfig(
    environment=("PATH=/bin",), command=("/bin/bash",), labels=(("z", "last"), ("a", "first")), volumes=("/data",)
)


def layer(tmp_path, name, content=b"layer"):
    file = tmp_path / f"{name}.tar.gz"
    file.write_bytes(content + name.encode())
    digest = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    record = LayerRecord(
        name=name, digest=digest, diff_id="sha256:d" + name, size_bytes=file.stat().st_size, unpacked_bytes=1, entries=1
    )
    return Layer(record, file)


def test_layout_has_a_blob_for_every_digest_it_names(tmp_path):
    layers = [layer(tmp_path, "base"), layer(tmp_path, "environment")]
    image = make_oci(CONFIG, "linux/amd64", [record for record, _ in layers], epoch=0)
    write_layout(tmp_path / "oci", image, layers, tag="mcore")
    assert json.loads((tmp_path / "oci/oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    [described] = json.loads((tmp_path / "oci/index.json").read_text())["manifests"]
    assert described["annotations"] == {"org.opencontainers.image.ref.name": "mcore"}
    assert described["digest"] == image.digest

    def blob(descriptor):
        data = (tmp_path / "oci/blobs/sha256" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
        assert descriptor["digest"] == "sha256:" + hashlib.sha256(data).hexdigest()
        assert descriptor["size"] == len(data)
        return data

    manifest = json.loads(blob(described))
    config = json.loads(blob(manifest["config"]))
    assert [blob(descriptor) for descriptor in manifest["layers"]] == [file.read_bytes() for _, file in layers]
    assert config["rootfs"] == {"type": "layers", "diff_ids": ["sha256:dbase", "sha256:denvironment"]}
    assert len(list((tmp_path / "oci/blobs/sha256").iterdir())) == 4


LAYER = LayerRecord(
    name="base", digest=sha256_bytes(b"1"), diff_id=sha256_bytes(b"2"), size_bytes=3, unpacked_bytes=4, entries=5
)


def test_it_names_the_same_blobs():
    image = make_oci(RunConfig(), "linux/amd64", [LAYER], 1)
    found = json.loads(docker_manifest(image.manifest))
    assert found == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": image.config_digest,
            "size": len(image.config),
        },
        "layers": [
            {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": LAYER.digest, "size": 3}
        ],
    }
    assert docker_manifest(image.manifest) == docker_manifest(image.manifest)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]"])
def test_what_is_no_manifest_is_refused(content):
    with pytest.raises(CheckRefusedError):
        docker_manifest(content)
