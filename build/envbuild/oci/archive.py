"""Root file systems in tars that have no manifest: plain ones, and what ``docker save`` writes."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from envbuild.core.digests import sha256_file
from envbuild.core.files import machine_errors
from envbuild.oci.files import ArchiveFiles
from envbuild.oci.layout import SAVED_FILE, SavedImage, SavedImages
from envbuild.oci.models import BaseConfig, Configuration, refused_as_base
from envbuild.oci.pull import base_config
from envbuild.rootfs.blobs import GZIP_MAGIC, LayerBlob, open_blob
from envbuild.rootfs.gzip_writer import GzipWriter
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.single_layer import content_of


def rootfs(file: Path, folder: Path) -> list[Layer]:
    """The one layer of a root file system's tar: the file itself where it is gzip, else gzipped here.

    Raises:
        CheckRefusedError: it is not a tar.
    """
    return [_layer(file, folder / "1", "base", f"the tar {file}")]


def open_base_archive(file: Path, scratch: Path) -> contextlib.closing[ArchiveFiles]:
    """The files of a base's archive."""
    return contextlib.closing(ArchiveFiles(file, scratch, f"the archive {file}", refused_as_base))


def docker_archive(file: Path, tag: str | None, platform: str, folder: Path) -> tuple[list[Layer], BaseConfig]:
    """The layers and the configuration of an image of ``docker save``.

    Raises:
        CheckRefusedError: it is not such an archive, does not have the image, or is damaged.
    """
    with open_base_archive(file, folder) as archive:
        saved = _choose(archive, tag)
        configuration = archive.parse(saved.config, Configuration)
        diff_ids = configuration.rootfs.diff_ids
        if not configuration.platform.is_for(platform):
            raise archive.refused(f"The base is for {platform}; it is for {configuration.platform}.")
        if len(diff_ids) != len(saved.layers):
            raise archive.refused(f"It has {len(saved.layers)} layers, and its configuration {len(diff_ids)}.")
        layers = []
        # One plain tar at a time: the disk need not hold all layers unpacked.
        for number, (member, diff_id) in enumerate(zip(saved.layers, diff_ids, strict=True), 1):
            plain = folder / f"{number}.tar"
            archive.copy(member, plain)
            name = f"base-{number}" if len(diff_ids) > 1 else "base"
            called = f"layer {name} of {archive.name}"
            layers.append(_layer(plain, folder / f"{number}", name, called, diff_id))
            plain.unlink()
        return layers, base_config(configuration, archive.name)


def _choose(archive: ArchiveFiles, tag: str | None) -> SavedImage:
    images = archive.parse(SAVED_FILE, SavedImages).root
    if not images:
        raise archive.refused(f"Its {SAVED_FILE} lists no image.", "Write it anew: docker save IMAGE.")
    matching = [image for image in images if tag is None or tag in (image.tags or ())]
    if len(matching) != 1:
        known = ", ".join(sorted(name for image in images for name in image.tags or ("(without a tag)",)))
        why = "It has several images" if matching else f"It has no image {tag}"
        raise archive.refused(f"{why}; tags in it: {known}.", 'Name one under [obtain] of the base: tag = "..."')
    return matching[0]


def _layer(file: Path, to: Path, name: str, called: str, diff_id: str = "") -> Layer:
    """A tar as a layer that is gzipped: a copy if it is so already.

    Args:
        called: what errors call it, as neither file need be one that users know.
    """
    with machine_errors(to):
        with file.open("rb") as stream:
            is_gzip = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        if is_gzip:
            shutil.copyfile(file, to)
    if not is_gzip:
        with contextlib.closing(open_blob(LayerBlob(file=file, called=called))) as pieces, GzipWriter(to) as writer:
            for piece in pieces:
                writer.write(piece)
    # Read again as it will be read later: the copy is compared, not the file that it was made of.
    content = content_of(LayerBlob(file=to, called=called))
    if diff_id and content.diff_id != diff_id:
        raise refused_as_base(called, f"Its tar is {content.diff_id}; the archive's configuration states {diff_id}.")
    record = LayerRecord(
        name=name,
        digest=sha256_file(to),
        size_bytes=to.stat().st_size,
        **content.model_dump(),
    )
    return Layer(record, to)
