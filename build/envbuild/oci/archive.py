"""Root file systems in tars that have no manifest: plain ones, and what ``docker save`` writes."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from envbuild.core.digests import sha256_file
from envbuild.core.files import machine_errors
from envbuild.oci.models import BaseConfig, Configuration, base_config, read, refused
from envbuild.oci.pull import content_of
from envbuild.oci.sources import ArchiveSource
from envbuild.rootfs.blobs import GZIP_MAGIC, LayerBlob, open_blob
from envbuild.rootfs.gzip_writer import GzipWriter
from envbuild.rootfs.layer import Layer, LayerRecord


class _Saved(BaseModel):
    """An image in an archive of ``docker save``."""

    config: str = Field(alias="Config")
    tags: tuple[str, ...] | None = Field(default=None, alias="RepoTags")
    layers: tuple[str, ...] = Field(alias="Layers", min_length=1)


_MANIFEST = TypeAdapter(tuple[_Saved, ...])


def rootfs(file: Path, folder: Path) -> list[Layer]:
    """The one layer of a root file system's tar: the file itself where it is gzip, else gzipped here.

    Raises:
        CheckRefusedError: it is no tar.
    """
    return [_layer(file, folder / "1", "base", f"the tar {file}")]


def docker_archive(file: Path, tag: str | None, platform: str, folder: Path) -> tuple[list[Layer], BaseConfig]:
    """The layers and the configuration of an image of ``docker save``.

    Raises:
        CheckRefusedError: it is no such archive, has no such image, or is damaged.
    """
    with contextlib.closing(ArchiveSource(file)) as archive:
        saved = _choose(archive, tag)
        configuration = read(archive.read(saved.config), Configuration, archive.name)
        diff_ids = configuration.rootfs.diff_ids
        if not configuration.platform.is_for(platform):
            raise refused(archive.name, f"The base is for {platform}; it is for {configuration.platform}.")
        if len(diff_ids) != len(saved.layers):
            raise refused(archive.name, f"It has {len(saved.layers)} layers, and its configuration {len(diff_ids)}.")
        layers = []
        for number, (member, diff_id) in enumerate(zip(saved.layers, diff_ids, strict=True), 1):
            plain = folder / f"{number}.tar"
            archive.copy(member, plain)
            name = f"base-{number}" if len(diff_ids) > 1 else "base"
            called = f"layer {name} of {archive.name}"
            layers.append(_layer(plain, folder / f"{number}", name, called, diff_id))
            plain.unlink()
        return layers, base_config(configuration, archive.name)


def _choose(archive: ArchiveSource, tag: str | None) -> _Saved:
    try:
        images = _MANIFEST.validate_json(archive.read("manifest.json"))
    except ValidationError as error:
        raise refused(archive.name, "Its manifest.json is none of docker save.") from error
    if not images:
        raise refused(archive.name, "Its manifest.json lists no image.", "Write it anew: docker save IMAGE.")
    found = [image for image in images if tag is None or tag in (image.tags or ())]
    if len(found) != 1:
        known = ", ".join(sorted(name for image in images for name in image.tags or ("(without a tag)",)))
        why = "It has several images" if found else f"It has no image {tag}"
        raise refused(archive.name, f"{why}; tags in it: {known}.", 'Name one under [obtain] of the base: tag = "..."')
    return found[0]


def _layer(file: Path, to: Path, name: str, called: str, diff_id: str = "") -> Layer:
    """A tar as a layer that is gzipped: a copy if it is so already.

    Args:
        called: what errors call it: neither file need be one that people know.
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
    content = content_of(to, called=called)
    if diff_id and content.diff_id != diff_id:
        raise refused(called, f"Its tar is {content.diff_id}; the archive's configuration states {diff_id}.")
    record = LayerRecord(
        name=name,
        digest=sha256_file(to),
        size_bytes=to.stat().st_size,
        **content.model_dump(),
    )
    return Layer(record, to)
