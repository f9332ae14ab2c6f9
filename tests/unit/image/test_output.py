"""Placed images: linked from the store, and one image for every target that has the same hardware."""

import json
import os
import stat
from pathlib import Path

import pytest
from helpers.layer_tars import file, layout_of
from helpers.placed_images import RECORD

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError
from envbuild.image.output import check_place, find_image, place, verify
from envbuild.store import entry_index
from envbuild.store.record import RECORD_FILE, dump


@pytest.fixture
def umask():
    """Of an account that keeps its files to itself, from before the store entry is made."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def entry(tmp_path):
    """A store entry with an image of a few bytes; its record names the target it was first built for."""
    folder = tmp_path / "store" / "entry"
    folder.mkdir(parents=True)
    image, layer = layout_of(folder, file("a"))
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
    entry_index.write_index(folder)
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
        assert entry_index.find_damage(image.path) == ""
        assert image.path.name == f"mcore-debian12-{target}"
        assert find_image(tmp_path / "out", "mcore", "debian12", target).record.target == target
        [described] = json.loads((image.path / "oci/index.json").read_bytes())["manifests"]
        tags.append(described["annotations"]["org.opencontainers.image.ref.name"])
        digests.add(described["digest"])
        # Whoever owns the place can write into it, and that must not be into the store.
        assert all(path.stat().st_nlink == 1 for path in image.path.rglob("*") if path.is_file())
    assert tags == ["mcore-debian12-h100", "mcore-debian12-h200"]
    assert len(digests) == 1


def test_a_hard_link_of_an_earlier_version_becomes_a_copy(entry, tmp_path):
    image, _ = placed(entry, tmp_path, "h200")
    (image.path / "image.sqsh").unlink()
    (image.path / "image.sqsh").hardlink_to(entry[0] / "image.sqsh")
    assert placed(entry, tmp_path, "h200")[1] is True
    assert not (image.path / "image.sqsh").samefile(entry[0] / "image.sqsh")
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


def test_image_that_is_not_the_records_is_refused(entry, tmp_path):
    image, _ = placed(entry, tmp_path, "h200")
    (image.path / "image.sqsh").unlink()
    (image.path / "image.sqsh").write_bytes(b"another")
    with pytest.raises(CheckRefusedError, match="not the one that was built"):
        verify(image)


def somewhere(tmp_path):
    path = tmp_path / "out/images/mcore-debian12-h200"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize("name", ["results.txt", "record.json", ".sealed.json", "oci/index.json"])
def test_folder_without_an_image_is_kept(entry, tmp_path, name):
    file = somewhere(tmp_path) / name
    file.parent.mkdir(parents=True)
    file.write_text('{"schema": "mine"}')
    with pytest.raises(ConfigurationError, match="would be lost") as caught:
        placed(entry, tmp_path, "h200")
    assert name.split("/")[0] in caught.value.why
    assert file.read_text() == '{"schema": "mine"}'


@pytest.mark.parametrize("name", ["notes.txt", "oci/mine", "oci/blobs/sha256/mine", "image.sqsh.d/mine", "mine/x"])
def test_other_files_next_to_a_placed_image_are_kept(entry, tmp_path, name):
    image, _ = placed(entry, tmp_path, "h200")
    mine = image.path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    assert placed(entry, tmp_path, "h200")[1] is False  # nothing to replace, nothing to refuse
    (image.path / "image.sqsh").unlink()
    with pytest.raises(ConfigurationError, match="would be lost") as caught:
        placed(entry, tmp_path, "h200")
    assert name.rpartition("/")[0] in caught.value.why
    assert mine.read_text() == "mine"
    mine.unlink()
    if mine.parent.name in ("mine", "image.sqsh.d"):
        mine.parent.rmdir()
    assert placed(entry, tmp_path, "h200")[1] is True


def test_image_of_an_older_version_is_replaced(entry, tmp_path):
    """Without seal and reports, with another manifest's blobs; and one whose seal lists files of a version to come."""
    image, _ = placed(entry, tmp_path, "h200")
    (image.path / ".sealed.json").unlink()
    (image.path / "oci/blobs/sha256" / ("a" * 64)).write_text("an older blob")
    assert placed(entry, tmp_path, "h200")[1] is True
    assert not (image.path / "oci/blobs/sha256" / ("a" * 64)).exists()
    (image.path / "new").mkdir()
    (image.path / "new/report").write_text("x")
    listed = json.loads((image.path / ".sealed.json").read_bytes()) | {"new/report": [1, "sha256:x"]}
    (image.path / ".sealed.json").write_text(json.dumps(listed))
    assert placed(entry, tmp_path, "h200")[1] is True
    assert not (image.path / "new").exists()


def test_place_is_tried_before_work_starts_and_nothing_is_left(entry, tmp_path):
    check_place(tmp_path / "out", "mcore", "debian12", "h200")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for bad in (tmp_path / "file", tmp_path / "link"):
        with pytest.raises(MachineError, match=f"cannot write {bad}/images/mcore-debian12-h200"):
            check_place(bad, "mcore", "debian12", "h200")
    somewhere(tmp_path).write_text("mine")
    with pytest.raises(ConfigurationError, match="would be lost"):
        check_place(tmp_path / "out", "mcore", "debian12", "h200")
    assert [item.name for item in (tmp_path / "out/images").iterdir()] == ["mcore-debian12-h200"]
    placed(entry, tmp_path, "h100")
    check_place(tmp_path / "out", "mcore", "debian12", "h100")


def test_modes_are_the_same_whatever_the_umask(umask, entry, tmp_path):
    image, _ = placed(entry, tmp_path, "h200")
    found = [image.path, *image.path.rglob("*")]
    modes = {path.relative_to(image.path): stat.S_IMODE(path.stat().st_mode) for path in found}
    assert modes == {path.relative_to(image.path): 0o755 if path.is_dir() else 0o644 for path in found}
    assert len(modes) > 8
    assert placed(entry, tmp_path, "h200")[1] is False
    assert entry_index.find_damage(entry[0]) == ""


def test_out_dir_without_access_is_named_in_the_error(tmp_path, monkeypatch):
    """The kernel's refusal is injected: root may enter everything."""

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(MachineError, match="no permission to write"):
        check_place(tmp_path / "out", "mcore", "debian12", "h200")
