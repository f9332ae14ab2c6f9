"""The OCI layout: every digest is that of the bytes it names."""

import hashlib
import json

from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
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


def test_config_has_start_and_creation_time(tmp_path):
    record, _ = layer(tmp_path, "base")
    config = json.loads(make_oci(CONFIG, "linux/arm64", [record], epoch=1_700_000_000).config)
    assert (config["os"], config["architecture"]) == ("linux", "arm64")
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert config["config"] == {
        "Env": ["PATH=/bin"],
        "Cmd": ["/bin/bash"],
        "Labels": {"a": "first", "z": "last"},
        "Volumes": {"/data": {}},
    }
    assert len(config["history"]) == len(config["rootfs"]["diff_ids"])
