"""Images on registries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.core.digests import is_digest, sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.oci.models import DOCUMENT_BYTES, INDEX_TYPES, MANIFEST_TYPES, Descriptor
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry
from envbuild.store.registry_errors import Wording

# The registry that has no name of its own in docker's references.
_DOCKER_HUB, _DOCKER_HUB_HOST = "docker.io", "registry-1.docker.io"


class RegistrySource:
    def __init__(self, image: str, ca_bundle: Path | None, environ: Mapping[str, str]) -> None:
        self.name = f"image {image}"
        place, _, self._tag = image.rpartition(":")
        host, _, repository = place.partition("/")
        # As docker reads references (distribution/reference, normalize.go): "debian" is docker.io/library/debian.
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
        # HEAD: Docker Hub counts a GET of a manifest as a pull, and limits those.
        answer = self._registry.ask("HEAD", f"manifests/{self._tag}", accept=(200, 404), headers=self._accept)
        if answer.status == 404:
            raise NetworkError(
                f"{self.name} is not on its registry",
                why="The registry knows no such repository or tag (or this account may not see it).",
                fix="Correct the name, or log in: docker login REGISTRY (or podman, skopeo, oras).",
            )
        # The header is recommended, not required (distribution-spec 1.0, "Pulling manifests").
        stated = answer.headers.get("Docker-Content-Digest", "")
        if is_digest(stated):
            return stated
        whole = self._registry.ask("GET", f"manifests/{self._tag}", accept=(200,), headers=self._accept)
        return sha256_bytes(whole.body)

    def document(self, digest: str, *, manifest: bool) -> bytes:
        path = f"{'manifests' if manifest else 'blobs'}/{digest}"
        content = self._registry.read(path, DOCUMENT_BYTES, self._accept if manifest else None)
        if content is None:
            raise self._missing(digest)
        return content

    def fetch(self, descriptor: Descriptor, to: Path) -> None:
        if not self._registry.download(f"blobs/{descriptor.digest}", descriptor.size_bytes, to):
            raise self._missing(descriptor.digest)

    def _missing(self, digest: str) -> NetworkError:
        return NetworkError(
            f"{self.name} is not whole on its registry",
            why=f"The registry does not have {digest}.",
            fix="It may have been removed there: envbuild image resolve --base NAME asks what the tag is now.",
        )
