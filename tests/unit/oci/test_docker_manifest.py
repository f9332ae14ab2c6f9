"""Docker's manifest of an OCI image: the same blobs under docker's names."""

import json

import pytest

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import RunConfig
from envbuild.oci.write import docker_manifest, make_oci
from envbuild.rootfs.layer import LayerRecord

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
