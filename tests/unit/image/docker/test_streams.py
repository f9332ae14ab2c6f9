"""Tars that are made while they are sent, and archives to and from a daemon."""

import io
import json
import tarfile

import pytest

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.image.docker.saved import archive_of, unpack_saved
from envbuild.image.docker.streams import tar_stream
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import LayerWriter


def read(chunks):
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        return {member.name: (member.mode, tar.extractfile(member).read()) for member in tar}


def test_tar_has_the_files(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"#!" * 1_000_000)
    program.chmod(0o755)
    long = "folder/" * 30 + "name"
    found = read(tar_stream({"b": b"bytes", "a/program": program, long: b"", "exact": b"x" * 512}))
    assert found.pop("a/program") == (0o755, b"#!" * 1_000_000)
    assert found == {"b": (0o644, b"bytes"), long: (0o644, b""), "exact": (0o644, b"x" * 512)}


def test_file_that_shrinks_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 3_000_000)
    stream = tar_stream({"file": file})
    next(stream)
    file.write_bytes(b"x")
    with pytest.raises(CheckRefusedError, match="became shorter"):
        list(stream)


@pytest.fixture
def layer(tmp_path):
    with LayerWriter(tmp_path / "layer.tar.gz", 5) as writer:
        writer.add_bytes("etc/name", b"content")
        writer.add_directory("opt")
    return Layer(writer.record("base"), tmp_path / "layer.tar.gz")


def config_of(*layers):
    rootfs = {"type": "layers", "diff_ids": [item.record.diff_id for item in layers]}
    return json.dumps({"os": "linux", "rootfs": rootfs}).encode()


def saved(config, layer, *, leave_out=(), new=False):
    """What `docker save` writes: a folder a layer, or blobs, as newer daemons do."""
    import gzip

    data = gzip.decompress(layer.file.read_bytes())
    place = f"blobs/sha256/{layer.record.diff_id[7:]}" if new else "a1/layer.tar"
    name = f"blobs/sha256/{sha256_bytes(config)[7:]}" if new else "config.json"
    files = {place: data, name: config, "manifest.json": json.dumps([{"Config": name, "Layers": [place]}]).encode()}
    return tar_stream({key: value for key, value in files.items() if key not in leave_out})


@pytest.mark.parametrize("new", [False, True])
def test_saved_image_has_its_configuration_and_its_layers(layer, tmp_path, new):
    config = config_of(layer)
    (tmp_path / "out").mkdir()
    found = unpack_saved(saved(config, layer, new=new), sha256_bytes(config), tmp_path / "out", {})
    assert found.config == config
    (made,) = found.layers
    assert (made.record.diff_id, made.record.entries) == (layer.record.diff_id, 2)
    assert made.record.unpacked_bytes == layer.record.unpacked_bytes
    assert [path.name for path in (tmp_path / "out").iterdir()] == [made.file.name]
    assert unpack_saved(saved(config, layer, new=new), sha256_bytes(config), tmp_path / "out", {
        layer.record.diff_id: layer}).layers == (layer,)  # fmt: skip


def test_archive_that_is_not_of_the_image_is_refused(layer, tmp_path):
    config = config_of(layer)
    image = sha256_bytes(config)
    whole = b"".join(saved(config, layer))
    for archive, wanted in (
        ([whole[:700]], image),
        ([b"no tar"], image),
        ([], image),
        (saved(config, layer, leave_out=("manifest.json",)), image),
        (saved(config, layer, leave_out=("a1/layer.tar",)), image),
        ([whole], "sha256:" + "0" * 64),
    ):
        with pytest.raises(CheckRefusedError, match="the image that the daemon saved is not"):
            unpack_saved(archive, wanted, tmp_path, {})


def test_archive_to_load_has_the_configuration_byte_for_byte(layer):
    config = config_of(layer)
    found = read(archive_of(config, {layer.record.digest: layer.file}, "name:tag"))
    (entry,) = json.loads(found["manifest.json"][1])
    assert found[entry["Config"]][1] == config
    assert entry["RepoTags"] == ["name:tag"]
    assert [found[name][1] for name in entry["Layers"]] == [layer.file.read_bytes()]
