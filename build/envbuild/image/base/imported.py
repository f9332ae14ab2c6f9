"""Bases that are images already: on a registry, in an OCI layout, in a tar. Each is known by a digest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.base import Base, Mmdebstrap, OciLayout, RegistryImage, Tar
from envbuild.catalog.context import Context
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError, InternalError, UsageError
from envbuild.core.files import machine_errors
from envbuild.core.text import quoted_command
from envbuild.oci.archive import docker_archive, open_base_archive, rootfs
from envbuild.oci.files import FolderFiles, ImageSource
from envbuild.oci.index import only_digest
from envbuild.oci.models import BaseConfig, refused_as_base
from envbuild.oci.pull import find_image, keep_layers
from envbuild.oci.registry import RegistrySource
from envbuild.rootfs.layer import Layer


@dataclass(frozen=True, kw_only=True)
class ImportedBase:
    """A base that was taken: its layers, lowest first, and its configuration.

    Attributes:
        name: the image's name on its registry; empty where it has none.
        digest: of the image's manifest; empty for a root file system without one.
        made_by: where it is from, for the record.
    """

    layers: list[Layer]
    config: BaseConfig
    made_by: str
    name: str = ""
    digest: str = ""


def resolve(base: Base, name: str, root: Path, ca_bundle: Path | None) -> str:
    """The digest that a base has now, whatever its file states.

    Args:
        root: what the paths of its file are relative to.

    Raises:
        UsageError: the base has no digest to ask for.
        ConfigurationError: its file or folder is not there.
        CheckRefusedError: it holds several images.
        NetworkError: its registry cannot be reached, or does not know it.
    """
    match base.obtain:
        case RegistryImage(image=image):
            return RegistrySource(image, ca_bundle, os.environ).resolve()
        case OciLayout(tag=tag):
            return only_digest(_layout(base.obtain, name, root), tag)
        case Tar():
            file = _file(base.obtain, name, root)
            with machine_errors(file, "read"):
                return sha256_file(file)
        case Mmdebstrap():
            raise UsageError(
                f"base {name} has no digest to resolve",
                why="mmdebstrap makes it from this machine's apt sources.",
                fix="Name a base that is an image (`envbuild list bases` shows where each is from).",
            )


def import_base(folder: Path, base: Base, name: str, root: Path, context: Context) -> ImportedBase:
    """Put the layers of a base into ``folder``.

    Args:
        root: what the paths of its file are relative to.

    Raises:
        CheckRefusedError: it is not what its digest states, or no base can be made of it.
        ConfigurationError: its file or folder is not there.
        NetworkError: its registry cannot be reached, or refuses.
    """
    digest = base.pinned
    if digest is None:
        raise InternalError(f"base {name} has no digest")
    match base.obtain:
        case RegistryImage(image=image):
            # Credentials are in docker's configuration, which the environment names (DOCKER_CONFIG, HOME).
            source = RegistrySource(image, context.site.ca_bundle, os.environ)
            return replace(_from(source, digest, base, folder, context), name=image, made_by=f"{image}@{digest}")
        case OciLayout():
            return _from(_layout(base.obtain, name, root), digest, base, folder, context)
        case Tar(format="oci-archive", tag=tag):
            # An archive is pinned by the digest of its file; the image in it is then known by that of its manifest.
            with _checked(base.obtain, name, root, digest) as file, open_base_archive(file, folder) as archive:
                return _from(archive, only_digest(archive, tag), base, folder, context)
        case Tar(format=form, tag=tag):
            # The tar of a root file system states nothing about containers.
            config = BaseConfig()
            with (
                _checked(base.obtain, name, root, digest) as file,
                context.reporter.step(f"read {base.obtain.source}"),
            ):
                if form == "docker-archive":
                    layers, config = docker_archive(file, tag, base.platform, folder)
                else:
                    layers = rootfs(file, folder)
            return ImportedBase(layers=layers, config=config, made_by=f"{base.obtain.source}, {digest}")
        case Mmdebstrap():
            raise InternalError(f"base {name} is made by mmdebstrap")


def _from(source: ImageSource, digest: str, base: Base, folder: Path, context: Context) -> ImportedBase:
    with context.reporter.step(f"find {source.name}"):
        image = find_image(source, digest, base.platform)
    layers = keep_layers(source, image, context.store, folder)
    made_by = f"{base.obtain.source}, {base.pinned}"
    return ImportedBase(layers=layers, config=image.config, digest=image.digest, made_by=made_by)


def _layout(obtain: OciLayout, name: str, root: Path) -> FolderFiles:
    folder = root / obtain.path
    if not (folder / "oci-layout").is_file():
        raise _not_there(folder, name, "an OCI layout: a directory with the files oci-layout and index.json")
    return FolderFiles(folder, f"the OCI layout {folder}", refused_as_base)


def _file(obtain: Tar, name: str, root: Path) -> Path:
    file = root / obtain.path
    if not file.is_file():
        raise _not_there(file, name, "a file")
    return file


def _not_there(path: Path, name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"base {name} cannot be found",
        why=f"{path} is not {what}.",
        fix="Put it there, or correct path under [obtain] of the base; it is relative to the folder that holds envs/.",
    )


@contextlib.contextmanager
def _checked(obtain: Tar, name: str, root: Path, digest: str) -> Iterator[Path]:
    """The file of a base, which has its digest before it is read and after."""
    file = _file(obtain, name, root)

    # Twice: the file may be written to while it is read, and the layers' digests are those of what was read.
    def compare() -> None:
        with machine_errors(file, "read"):
            actual = sha256_file(file)
        if actual != digest:
            raise CheckRefusedError(
                f"{file} is not what base {name} is made of",
                why=f"Its digest should be {digest} and is {actual}.",
                fix=f"Put the right file there; or, if it was changed on purpose: "
                f"{quoted_command('envbuild', 'image', 'resolve', '--base', name)}",
            )

    compare()
    yield file
    compare()
