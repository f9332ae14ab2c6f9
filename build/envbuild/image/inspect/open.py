"""Opens what a command line names as an image: a folder, an OCI layout, an archive, or a .sqsh.

A .sqsh is one layer, and the configuration that its own files state; enroot's have root as the owner of everything.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.image.output import OCI_DIR, SQSH_FILE
from envbuild.image.record import ImageRecord
from envbuild.image.sbom.cyclonedx import MEDIA_TYPE as CYCLONEDX
from envbuild.image.squashfs.read import MAGIC, members_of_sqsh
from envbuild.oci.files import ArchiveFiles, FolderFiles, ImageFiles, blob_path
from envbuild.oci.layout import AttachedReport, Image, ImageLayer, open_docker_archive, open_layout
from envbuild.oci.models import INDEX_FILE, Configuration, RunConfig, not_an_image
from envbuild.store.record import RECORD_FILE, load

# What enroot writes there has some hundred lines.
MOST_BYTES = 8 << 20
_LABEL = re.compile(r"^# (?P<name>\S+) (?P<value>.*)$")


def open_sqsh(file: Path) -> OpenedImage:
    """The image of a .sqsh.

    Raises:
        CheckRefusedError: it cannot be read.
        MachineError: the program that reads it is missing.
    """
    try:
        config = _config(file)
    except CheckRefusedError as error:
        raise not_an_image(str(file), error.why) from error
    with machine_errors(file, "read"):
        size = file.stat().st_size
        digest = sha256_file(file)
    layer = ImageLayer(digest=digest, size_bytes=size, name="the .sqsh", members=lambda: members_of_sqsh(file))
    return OpenedImage(source=str(file), kind="sqsh", digest="", config=config, layers=(layer,))


def _config(file: Path) -> Configuration:
    """Variables and labels from the files that enroot writes; none where /etc or a file of them is a link."""
    texts = {"etc/environment": "", "etc/rc": ""}
    with contextlib.closing(members_of_sqsh(file, "etc")) as members:
        for member, content in members:
            if member.name in texts and content is not None and content.size <= MOST_BYTES:
                texts[member.name] = content.read().decode(errors="replace")
    labels = [match for line in texts["etc/rc"].splitlines() if (match := _LABEL.match(line))]
    run = RunConfig(
        environment=tuple(line for line in texts["etc/environment"].splitlines() if "=" in line),
        # The line "# enroot-provenance: URI" looks like a label, but for the colon.
        labels=tuple({label["name"]: label["value"] for label in labels if not label["name"].endswith(":")}.items()),
    )
    return Configuration(run=run)


@dataclass(frozen=True, kw_only=True)
class OpenedImage(Image):
    """An image, and what is known about it besides its own documents.

    Attributes:
        source: as it was named.
        kind: folder, layout, archive or sqsh.
        record: envbuild's own, where it lies next to the image and is about it.
        components: the stack's components, as far as the record or an attached SBOM states them.
    """

    source: str
    kind: str
    record: ImageRecord | None = None
    components: tuple[str, ...] = ()


_COMPONENT = {"name": "envbuild:component", "value": "true"}


class _SbomComponent(BaseModel):
    name: str
    properties: tuple[dict[str, Any], ...] = ()


class _Sbom(BaseModel):
    """What is read of an attached SBOM."""

    components: tuple[_SbomComponent, ...]


def open_image(named: str, scratch: Path) -> OpenedImage:
    """The image under a name: a folder of out/images, an OCI layout (FOLDER[:TAG]), an archive or a .sqsh file.

    Args:
        scratch: where files of an archive are put.

    Raises:
        ConfigurationError: there is nothing under that name.
        CheckRefusedError: it is not an image, or is damaged.
    """
    path, tag = place_and_tag(named)
    with machine_errors(path, "read"):
        return replace(_open(path, tag, scratch), source=named)


def place_and_tag(named: str) -> tuple[Path, str]:
    """What lies under a name, and the tag in it (``FOLDER:TAG``).

    Raises:
        ConfigurationError: there is nothing.
        CheckRefusedError: it is neither a directory nor a regular file.
    """
    with machine_errors(Path(named), "read"):
        place, tag = named, ""
        # A folder with a colon in its name comes before a tag.
        if not Path(named).exists() and ":" in named:
            place, _, tag = named.rpartition(":")
        path = Path(place)
        # An empty path would be the current folder.
        if not place or not path.exists():
            raise ConfigurationError(
                f"there is no image {named or repr(named)}",
                why=f"{path} does not exist." if place else "The name is empty.",
                fix="Name a folder of out/images, an OCI layout (FOLDER or FOLDER:TAG), an archive, or a .sqsh file.",
            )
        # Reading a FIFO waits for a writer, and some devices never end.
        if not path.is_dir() and not path.is_file():
            raise not_an_image(str(path), "It is neither a directory nor a regular file.")
    return path, tag


def _open(path: Path, tag: str, scratch: Path) -> OpenedImage:
    if path.is_dir():
        if (path / RECORD_FILE).is_file() and (path / OCI_DIR).is_dir():
            return _with_record(_layout(FolderFiles(path / OCI_DIR), tag, "folder"), path)
        if (path / INDEX_FILE).is_file():
            image = _layout(FolderFiles(path), tag, "layout")
            return _with_record(image, path.parent) if (path.parent / RECORD_FILE).is_file() else image
        raise not_an_image(str(path), f"It has neither {RECORD_FILE} and {OCI_DIR}/ nor {INDEX_FILE}.")
    with path.open("rb") as stream:
        is_sqsh = stream.read(len(MAGIC)) == MAGIC
    if is_sqsh:
        return _sqsh(path)
    # `docker save` since 25 writes both files: an OCI layout, and the old manifest.json, which has no digests.
    files = ArchiveFiles(path, scratch)
    if files.has(INDEX_FILE):
        return _layout(files, tag, "archive")
    return OpenedImage(**vars(open_docker_archive(files)), source=files.name, kind="archive")


def _layout(files: ImageFiles, tag: str, kind: str) -> OpenedImage:
    image = open_layout(files, tag)
    components = _components(files, image.reports)
    # Not asdict, which would turn the layers into dictionaries.
    return OpenedImage(**vars(image), source=files.name, kind=kind, components=components)


def _components(files: ImageFiles, reports: Iterable[AttachedReport]) -> tuple[str, ...]:
    """The stack's components, as the attached SBOM has them."""
    for report in reports:
        if report.artifact_type == CYCLONEDX and report.files:
            listed = files.parse(blob_path(report.files[0]), _Sbom).components
            return tuple(component.name for component in listed if _COMPONENT in component.properties)
    return ()


def _with_record(image: OpenedImage, folder: Path) -> OpenedImage:
    """The image with the record next to it, if that is about this image."""
    record = load(folder / RECORD_FILE, ImageRecord)
    if record.oci_digest != image.digest:
        return image
    return replace(image, record=record, components=record.components or image.components)


def _sqsh(path: Path) -> OpenedImage:
    """A .sqsh, with the record next to it if that is about this file."""
    image = open_sqsh(path)
    if path.name == SQSH_FILE and (path.parent / RECORD_FILE).is_file():
        record = load(path.parent / RECORD_FILE, ImageRecord)
        if record.sqsh and record.sqsh.digest == image.layers[0].digest:
            return replace(image, record=record, components=record.components)
    return image
