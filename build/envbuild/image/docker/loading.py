"""Puts an image of the store into a daemon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.core.errors import BuildError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.image.docker.engine import NO_SPACE, Engine, daemon_disk_full
from envbuild.image.docker.saved import archive_of
from envbuild.image.output import OCI_DIR
from envbuild.image.record import ImageRecord


def put_into(engine: Engine, entry: Path, record: ImageRecord, tag: str, reporter: Reporter) -> bool:
    """Have an image in a daemon under a tag; whether anything had to be done.

    Its layers are streamed from the store as they are, and its configuration byte for byte: it has the same ID in every
    daemon.

    Raises:
        BuildError: the daemon does not take it.
        MachineError: the daemon went away, or has no space.
    """
    there = engine.find(tag)
    if there is not None and there.id == record.config_digest:
        return False
    if engine.find(record.config_digest) is None:
        blobs = entry / OCI_DIR / "blobs/sha256"
        files = {layer.digest: blobs / layer.digest.removeprefix("sha256:") for layer in record.layers}
        with machine_errors(blobs, "read"):
            config = (blobs / record.config_digest.removeprefix("sha256:")).read_bytes()
        load_image(engine, config, files, tag, reporter)
    engine.tag(record.config_digest, tag)
    return True


def load_image(engine: Engine, config: bytes, layers: Mapping[str, Path], tag: str, reporter: Reporter) -> None:
    """Stream an image into a daemon.

    Args:
        layers: their files by their digests, lowest first.

    Raises:
        BuildError: the daemon does not take it.
        MachineError: the daemon went away, or has no space.
    """
    with reporter.step(f"load the image into {engine.version}"):
        archive = archive_of(config, layers, tag)
        problems = [str(message["error"]) for message in engine.load(archive) if message.get("error")]
    if problems and NO_SPACE in problems[-1]:
        raise daemon_disk_full(problems[-1])
    if problems or engine.find(tag) is None:
        raise BuildError(
            f"the docker daemon does not take the image {tag}",
            why=problems[-1] if problems else "It does not have it after loading it.",
            fix="Its log (journalctl -u docker) may say more. The image itself is complete: --format oci has it.",
        )
