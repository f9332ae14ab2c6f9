"""Placed images: linked from the store, and one image for every target that has the same hardware."""

import json

import pytest
from unit.image.test_record import RECORD

from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.image.layers import Layer
from envbuild.image.oci import RunConfig, make_oci, write_layout
from envbuild.image.outputs import find_image, place, verify
from envbuild.image.record import RECORD_FILE, LayerRecord, dump
from envbuild.store import seals


@pytest.fixture
def entry(tmp_path):
    """A store entry with an image of a few bytes; its record names the target it was first built for."""
    folder = tmp_path / "store" / "entry"
    folder.mkdir(parents=True)
    file = tmp_path / "layer"
    file.write_bytes(b"a layer")
    layer = LayerRecord(
        name="base", digest=sha256_file(file), diff_id="sha256:2", size_bytes=7, unpacked_bytes=7, entries=1
    )
    image = make_oci(RunConfig(), "linux/amd64", [layer], 1)
    write_layout(folder / "oci", image, [Layer(layer, file)], tag="mcore")
    (folder / "image.sqsh").write_bytes(b"a squashfs")
    record = RECORD.model_copy(
        update={
            "target": "h100",
            "oci_digest": image.digest,
            "config_digest": image.config_digest,
            "layers": (layer,),
            "sqsh": RECORD.sqsh.model_copy(update={"digest": sha256_bytes(b"a squashfs")}),
        }
    )
    (folder / RECORD_FILE).write_bytes(dump(record))
    seals.seal(folder)
    return folder, record


def placed(entry, tmp_path, target):
    folder, record = entry
    return place(folder, tmp_path / "out", record.model_copy(update={"target": target}))


def test_two_targets_of_one_image_have_a_folder_and_a_tag_each(entry, tmp_path):
    tags, digests = [], set()
    for target in ("h100", "h200"):
        image, new = placed(entry, tmp_path, target)
        assert new
        verify(image)
        assert seals.broken(image.path) == ""
        assert image.path.name == f"mcore-debian12-{target}"
        assert find_image(tmp_path / "out", "mcore", "debian12", target).record.target == target
        [described] = json.loads((image.path / "oci/index.json").read_bytes())["manifests"]
        tags.append(described["annotations"]["org.opencontainers.image.ref.name"])
        digests.add(described["digest"])
        assert (image.path / "image.sqsh").samefile(entry[0] / "image.sqsh")
    assert tags == ["mcore-debian12-h100", "mcore-debian12-h200"]
    assert len(digests) == 1


def test_placing_again_does_nothing(entry, tmp_path):
    placed(entry, tmp_path, "h200")
    assert placed(entry, tmp_path, "h200")[1] is False


@pytest.mark.parametrize("name", ["record.json", "oci/index.json", "image.sqsh", ".sealed.json"])
def test_file_that_is_gone_or_another_is_put_back(entry, tmp_path, name):
    image, _ = placed(entry, tmp_path, "h200")
    good = (image.path / name).read_bytes()
    (image.path / name).unlink()
    assert placed(entry, tmp_path, "h200")[1] is True
    (image.path / name).unlink()
    (image.path / name).write_bytes(b"another")
    assert placed(entry, tmp_path, "h200")[1] is True
    assert (image.path / name).read_bytes() == good


def test_placed_file_that_was_changed_breaks_the_seal(entry, tmp_path):
    image, _ = placed(entry, tmp_path, "h200")
    record = image.path / RECORD_FILE
    record.write_bytes(record.read_bytes().replace(b'"mcore"', b'"other"'))
    assert RECORD_FILE in seals.broken(image.path)


def test_image_that_is_not_the_records_is_refused(entry, tmp_path):
    image, _ = placed(entry, tmp_path, "h200")
    (image.path / "image.sqsh").unlink()
    (image.path / "image.sqsh").write_bytes(b"another")
    with pytest.raises(CheckRefusedError, match="not the one that was built"):
        verify(image)
