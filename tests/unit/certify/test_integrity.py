"""An image that was changed is not certified, and not found certified: without reading all of it each time."""

import os
import shutil
from dataclasses import replace

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.store import entry_index


def overwrite(file):
    """Change a file in place, as no command of ours does."""
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


IMAGE_FILES = ["image.sqsh", "oci/index.json", "oci/blobs/sha256/{layer}"]


def file_of(world, name):
    layer = world.image.record.layers[0].digest.removeprefix("sha256:")
    return world.image.path / name.format(layer=layer)


@pytest.mark.parametrize("name", IMAGE_FILES)
def test_image_that_was_changed_is_refused_before_and_after_it_was_certified(world, name):
    file = file_of(world, name)
    overwrite(file)
    with pytest.raises(CheckRefusedError, match="is not the one that was built"):
        world.certify()
    assert world.calls == []
    overwrite(file)  # as it was
    world.certify()
    overwrite(file)
    with pytest.raises(CheckRefusedError, match="is not the one that was certified") as caught:
        world.certify()
    assert "was changed" in caught.value.why


@pytest.fixture
def large(world, monkeypatch):
    """The world with an image whose .sqsh counts as large; the files that were read since, in its list."""
    monkeypatch.setattr(entry_index, "ALWAYS_READ_BYTES", 8)
    world.read = []
    digest = entry_index.sha256_file
    monkeypatch.setattr(entry_index, "sha256_file", lambda path: world.read.append(path.name) or digest(path))
    return world


def in_disguise(file):
    """Change a file in place, with its size and its time kept."""
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def reads(world):
    """Which large files a certify reads that finds nothing to do."""
    world.read.clear()
    assert world.certify().ran is False
    return [name for name in world.read if name == "image.sqsh"]


def test_image_changed_with_its_size_and_time_kept_is_refused(large):
    large.certify()
    assert reads(large) == []
    file = file_of(large, "image.sqsh")
    in_disguise(file)
    with pytest.raises(CheckRefusedError, match="is not the one that was certified") as caught:
        large.certify()
    assert "image.sqsh was changed" in caught.value.why
    # It does not look untouched any more to whoever shares it: `envbuild image` puts it right.
    assert not entry_index.is_unchanged(file, file.stat().st_size)


def test_image_that_is_not_built_does_not_look_untouched(large):
    file = file_of(large, "image.sqsh")
    in_disguise(file)
    with pytest.raises(CheckRefusedError, match="is not the one that was built"):
        large.certify()
    assert not entry_index.is_unchanged(file, file.stat().st_size)


def test_image_whose_files_only_look_changed_is_read_once(large, tmp_path):
    large.certify()
    file = file_of(large, "image.sqsh")
    os.link(file, tmp_path / "link")
    assert (reads(large), reads(large)) == (["image.sqsh"], [])
    file.chmod(0o600)
    assert (reads(large), reads(large)) == (["image.sqsh"], [])
    shutil.copy2(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    assert (reads(large), reads(large)) == (["image.sqsh"], [])
    # So is that of a project that was copied.
    copy = tmp_path / "project-copy"
    shutil.copytree(large.project, copy)
    large.project, large.image = copy, replace(large.image, path=copy / large.image.path.relative_to(large.project))
    assert (reads(large), reads(large)) == (["image.sqsh"], [])


def test_damaged_stamps_are_ignored(large):
    large.certify()
    (file,) = (large.project / "cache" / "stamps").rglob("stamps.json")
    for text in ("{", "[]", '{"image.sqsh": 7}', None):
        file.unlink()
        if text is not None:
            file.write_text(text)
        entry_index.write_index(file.parent)
        assert (reads(large), reads(large)) == (["image.sqsh"], []), text
