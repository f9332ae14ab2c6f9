"""Loads a finished image into a docker daemon, with the same ID in every daemon."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from envbuild.core.digests import Json, canonical_json, hex_of
from envbuild.core.errors import BuildError, CheckRefusedError, MachineError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.image.docker.engine import NO_SPACE, Engine, disk_full, open_engine
from envbuild.image.output import OCI_DIR
from envbuild.image.record import ImageRecord

DOCKER = "docker"
CHUNK_BYTES = 1 << 20


def engine_for(formats: Collection[str]) -> Engine | None:
    """The daemon that the image is loaded into; None where ``docker`` is not among the formats.

    Raises:
        MachineError: no daemon answers.
    """
    if DOCKER not in formats:
        return None
    others = ",".join(name for name in formats if name != DOCKER) or "oci"
    try:
        return open_engine(otherwise=f"--format {others}")
    except MachineError as error:
        raise MachineError(
            error.what,
            why=f"--format docker loads the image into a daemon. {error.why}",
            fix=error.fix,
        ) from error


def load_image(engine: Engine, path: Path, record: ImageRecord, tag: str, reporter: Reporter) -> bool:
    """Load an image under a tag, unless the daemon has it; return whether anything was done.

    Args:
        path: the folder of the image: its store entry, or where it was placed.

    Raises:
        BuildError: the daemon refuses the image.
        MachineError: the daemon went away, or its disk is full.
    """
    image_id = record.config_digest
    # The ID of an image is the digest of its configuration (docker's graph drivers, podman): known before it is loaded.
    if engine.find(tag) == image_id:
        return False
    if engine.find(image_id) is None:
        with reporter.step(f"load the image into {engine.version}"):
            problem = engine.load(docker_archive(path / OCI_DIR / "blobs/sha256", record, tag))
        if NO_SPACE in problem:
            raise disk_full(problem)
        if problem or engine.find(image_id) is None:
            raise BuildError(
                f"the docker daemon refuses the image {tag}",
                why=problem or "The daemon does not have the image after loading it.",
                fix="See the daemon's log (journalctl -u docker). The image is complete; --format oci writes it.",
            )
    engine.tag(image_id, tag)
    return True


def docker_archive(blobs: Path, record: ImageRecord, tag: str) -> Iterator[bytes]:
    """The image as `docker save` would write it, generated while it is sent; the layers stay compressed."""
    config = blobs / hex_of(record.config_digest)
    names = [f"{hex_of(layer.digest)}.tar.gz" for layer in record.layers]
    # The format of `docker save` before OCI layouts (moby, image/tarexport), which every daemon and podman read.
    manifest: list[Json] = [{"Config": f"{config.name}.json", "RepoTags": [tag], "Layers": [*names]}]
    files: Mapping[str, Path] = {
        f"{config.name}.json": config,
        **{name: blobs / name.removesuffix(".tar.gz") for name in names},
    }
    for name, file in files.items():
        with machine_errors(file, "read"):
            size = file.stat().st_size
            yield _header(name, size)
            yield from _content(file, size)
        yield bytes(-size % tarfile.BLOCKSIZE)
    listing = canonical_json(manifest)
    yield _header("manifest.json", len(listing)) + listing + bytes(-len(listing) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _content(file: Path, size: int) -> Iterator[bytes]:
    left = size
    with file.open("rb") as stream:
        # Not more than the header stated, even if the file grew.
        while left and (chunk := stream.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
    if left:
        raise CheckRefusedError(
            f"{file} became shorter while it was read",
            why=f"{left} bytes of {size} are missing.",
            fix="Run the same command again when no other program writes to the file.",
        )
