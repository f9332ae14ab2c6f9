"""Fetches a published image as an OCI layout, each blob once for all processes of a store."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core.background import run_in_background
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.core.files import clone_or_copy, machine_errors, replace_tree
from envbuild.oci.models import Descriptor, Manifest, not_of_envbuild, read
from envbuild.oci.push import read_manifest
from envbuild.oci.write import OciImage, write_documents
from envbuild.publish.kept_files import KeptFile, WantedFile, keep_file
from envbuild.publish.models import Publication
from envbuild.publish.pull import Fetched, Pulled, PullRequest, admit, pull_with
from envbuild.publish.sources import RepositorySource, open_source

KIND = "oci-blobs"
PARALLEL = 4


def pull_layout(request: PullRequest, folder: Path, context: Context) -> Pulled:
    """Write a published image to a folder that does not exist yet, after its certificate was verified.

    Raises:
        UsageError: the folder is there, or the place has no OCI images.
        PublicationRefusedError, CertificateRefusedError, CheckRefusedError, ConfigurationError, NetworkError: see
            :func:`~envbuild.publish.pull.pull`.
    """
    source = open_source(request.reference.place, context.site)
    if not isinstance(source, RepositorySource):
        raise UsageError(
            f"{source.address} has no OCI images",
            why="A .sqsh store has .sqsh files alone.",
            fix="Name a registry, or leave --format oci out.",
        )
    if folder.exists():
        raise UsageError(f"{folder} is there already", why="No folder is overwritten.", fix="Name another --output.")

    def fetch(publication: Publication) -> Fetched:
        verified = admit(publication, publication.oci_digest, request, source, context)
        with context.reporter.step(f"{publication.tag}: {publication.size_bytes} bytes"):
            answer = read_manifest(source.registry, publication.oci_digest)
            if answer is None:
                raise CheckRefusedError(
                    f"the image {publication.tag} is refused",
                    why=f"{source.address} does not have {publication.oci_digest} any more, which its index names.",
                    fix="Publish it again; retention rules must spare what the index names.",
                )
            manifest = read(answer.content, Manifest, f"the image {publication.tag}", not_of_envbuild)
            files = _fetch_blobs(source, (manifest.config, *manifest.layers), context)
        return Fetched(
            verified=verified,
            anew=any(file.fetched for file in files),
            place=lambda: _place(answer.content, [file.path for file in files], publication.tag, folder.absolute()),
        )

    return pull_with(fetch, request, source, context)


def _place(manifest: bytes, files: list[Path], tag: str, folder: Path) -> Path:
    config, *layers = files
    image = OciImage(config=config.read_bytes(), manifest=manifest)
    with machine_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to it: a rename does not lead from one disk to another.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            staged = Path(temporary) / "layout"
            for file in layers:
                clone_or_copy(file, staged / "blobs/sha256" / file.name)
            write_documents(staged, image, tag)
            replace_tree(staged, folder)
    return folder


def _fetch_blobs(source: RepositorySource, blobs: tuple[Descriptor, ...], context: Context) -> list[KeptFile]:
    """The files of blobs in the store, in their order."""

    def fetch(share: tuple[Descriptor, ...]) -> list[KeptFile]:
        return [_blob(source, blob, context) for blob in share]

    # Each thread has every fourth blob.
    working = [run_in_background(partial(fetch, blobs[start::PARALLEL])) for start in range(PARALLEL)]
    shares = [work.result() for work in working]
    return [shares[number % PARALLEL][number // PARALLEL] for number in range(len(blobs))]


def _blob(source: RepositorySource, blob: Descriptor, context: Context) -> KeptFile:
    wanted = WantedFile(
        kind=KIND,
        digest=blob.digest,
        size_bytes=blob.size_bytes,
        name=f"the blob {blob.digest}",
        where=source.address,
    )

    def download(to: Path, start: int) -> bool:
        return source.registry.download(f"blobs/{blob.digest}", blob.size_bytes, to, start=start)

    return keep_file(context.store, wanted, download)
