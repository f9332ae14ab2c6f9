"""Where the documents and layers of an image come from: a registry, a layout's directory, or a tar of one."""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.core.files import machine_errors
from envbuild.core.text import printable
from envbuild.oci.models import DOCUMENT_BYTES, INDEX_TYPES, MANIFEST_TYPES, Descriptor, Index, read, refused
from envbuild.oci.write import INDEX_FILE, REF_NAME
from envbuild.rootfs.tars import damage_refused, open_archive
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry, Wording

# The registry that has no name of its own in docker's references.
_DOCKER_HUB, _DOCKER_HUB_HOST = "docker.io", "registry-1.docker.io"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageSource(Protocol):
    """Whatever has an image. What it gives is compared with the digest that was asked for by whoever asks."""

    @property
    def name(self) -> str:
        """What errors call the image."""

    def document(self, digest: str, *, manifest: bool) -> bytes:
        """A manifest, an index or a configuration."""

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        """Write a layer to a file."""


class RegistrySource:
    """An image on a registry."""

    def __init__(self, image: str, ca_bundle: Path | None, environ: Mapping[str, str]) -> None:
        self.name = f"image {image}"
        place, _, self._tag = image.rpartition(":")
        host, _, repository = place.partition("/")
        if host in (_DOCKER_HUB, f"index.{_DOCKER_HUB}"):
            host = _DOCKER_HUB_HOST
            repository = repository if "/" in repository else f"library/{repository}"
        address = parse_address(f"oci://{host}/{repository}")
        self._registry = Registry(address, ca_bundle, environ, Wording(noun="registry of the base,"))
        self._accept = {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}

    def resolve(self) -> str:
        """The digest that the tag has now.

        Raises:
            NetworkError: the registry cannot be reached, refuses, or does not know the tag.
        """
        answer = self._registry.ask("HEAD", f"manifests/{self._tag}", accept=(200, 404), headers=self._accept)
        if answer.status == 404:
            raise NetworkError(
                f"{self.name} is not on its registry",
                why="The registry knows no such repository or tag (some say so also to those who may not see it).",
                fix="Correct the name, or log in: docker login REGISTRY (or podman, skopeo, oras).",
            )
        stated = answer.headers.get("Docker-Content-Digest", "")
        if _DIGEST.fullmatch(stated):
            return stated
        whole = self._registry.ask("GET", f"manifests/{self._tag}", accept=(200,), headers=self._accept)
        return sha256_bytes(whole.body)

    def document(self, digest: str, *, manifest: bool) -> bytes:
        path = f"{'manifests' if manifest else 'blobs'}/{digest}"
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            file = Path(folder) / "document"
            headers = self._accept if manifest else None
            if not self._registry.download(path, DOCUMENT_BYTES, file, headers):
                raise self._missing(digest)
            with machine_errors(file, "read"):
                return file.read_bytes()

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        if not self._registry.download(f"blobs/{descriptor.digest}", descriptor.size_bytes, to):
            raise self._missing(descriptor.digest)

    def _missing(self, digest: str) -> NetworkError:
        return NetworkError(
            f"{self.name} is not whole on its registry",
            why=f"The registry does not have {digest}.",
            fix="It may have been removed there: envbuild image resolve --base NAME asks what the tag is now.",
        )


class LayoutSource:
    """An image in the directory of an OCI layout."""

    def __init__(self, folder: Path) -> None:
        self.name = f"the OCI layout {folder}"
        self._folder = folder

    def resolve(self, tag: str | None) -> str:
        """The digest of the image with a tag, or of the only one.

        Raises:
            CheckRefusedError: there is none, or there are several.
        """
        return choose_tagged(self._read(self._folder / INDEX_FILE), tag, self.name)

    def document(self, digest: str, *, manifest: bool) -> bytes:  # noqa: ARG002 - all are blobs here
        return self._read(self._blob(digest))

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        file = self._blob(descriptor.digest)
        self._check(file)
        with machine_errors(to):
            # No hard link: what is changed there later is nothing to the store.
            shutil.copyfile(file, to)

    def _blob(self, digest: str) -> Path:
        return self._folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def _check(self, file: Path) -> None:
        if not file.is_file():
            raise refused(self.name, f"{file} is not there, or is no file.", "Write the layout anew.")

    def _read(self, file: Path) -> bytes:
        self._check(file)
        with machine_errors(file, "read"), file.open("rb") as stream:
            return stream.read(DOCUMENT_BYTES + 1)


class ArchiveSource:
    """The members of a tar by their names: an OCI layout in one, or what ``docker save`` writes. Unpacks nothing."""

    def __init__(self, file: Path) -> None:
        self.name = f"the archive {file}"
        self._file = file
        with self._refusing():
            self._tar, self._members = open_archive(file)

    def close(self) -> None:
        """Let go of the file."""
        self._tar.close()

    def resolve(self, tag: str | None) -> str:
        """The digest of the image with a tag, or of the only one, of an OCI layout."""
        return choose_tagged(self.read(INDEX_FILE), tag, self.name)

    def document(self, digest: str, *, manifest: bool) -> bytes:  # noqa: ARG002 - all are blobs here
        return self.read(_blob_name(digest))

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        self.copy(_blob_name(descriptor.digest), to)

    def read(self, name: str) -> bytes:
        """The content of a member that is a document."""
        with self._refusing():
            content = self._tar.extractfile(self._member(name))
            return content.read(DOCUMENT_BYTES + 1) if content else b""

    def copy(self, name: str, to: Path) -> None:
        """Write a member's content to a file."""
        with machine_errors(to), self._refusing(), to.open("wb") as out:
            content = self._tar.extractfile(self._member(name))
            shutil.copyfileobj(cast("tarfile.ExFileObject", content), out, 1 << 20)

    def _member(self, name: str) -> tarfile.TarInfo:
        member = self._members.get(name)
        for _ in range(2):  # docker before 25 writes a layer that it has already as a link to it
            if member is not None and (member.issym() or member.islnk()):
                above = name.rpartition("/")[0].split("/") if member.issym() else []
                name = _joined(above, member.linkname)
                member = self._members.get(name)
        if member is None or not member.isreg():
            raise refused(self.name, f"It has no file {name}.", "Write the archive anew, or correct the base's format.")
        return member

    def _refusing(self) -> contextlib.AbstractContextManager[None]:
        return damage_refused(
            lambda why: CheckRefusedError(f"{self._file} is damaged", why=why, fix="Copy or write it anew.")
        )


def _joined(above: list[str], link: str) -> str:
    parts = list(above)
    for part in link.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def choose_tagged(raw: bytes, tag: str | None, name: str) -> str:
    """The digest of the image with a tag in a layout's index, or of the only one."""
    index = read(raw, Index, name)
    if not index.manifests:
        raise refused(name, f"Its {INDEX_FILE} lists no image.")
    tags = [(entry.annotations.get(REF_NAME, ""), entry.digest) for entry in index.manifests]
    found = {digest for known, digest in tags if tag in (None, known)}
    if len(found) == 1:
        return found.pop()
    known = ", ".join(sorted(known or "(without a tag)" for known, _ in tags))
    why = "It has no image with this tag" if not found else "It has several images"
    raise CheckRefusedError(
        f"{name} does not say which image the base is",
        why=printable(f"{why}; tags in it: {known}."),
        fix='Name one of them under [obtain] of the base: tag = "..."',
    )
