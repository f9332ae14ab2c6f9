"""Puts an image of the store into a daemon."""

from __future__ import annotations

from pathlib import Path

from envbuild.core.errors import BuildError
from envbuild.core.progress import Reporter
from envbuild.image.docker.engine import NO_SPACE, Engine, daemon_disk_full
from envbuild.image.docker.saved import archive_of
from envbuild.image.outputs import OCI_DIR
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
        with reporter.step(f"load the image into {engine.version}"):
            archive = archive_of(entry / OCI_DIR, record.config_digest, record.layers, tag)
            problems = [str(message["error"]) for message in engine.load(archive) if message.get("error")]
        if problems and NO_SPACE in problems[-1]:
            raise daemon_disk_full(problems[-1])
        if problems or engine.find(record.config_digest) is None:
            raise BuildError(
                f"the docker daemon does not take the image {tag}",
                why=problems[-1] if problems else f"It has no image {record.config_digest} after loading it.",
                fix="Its log (journalctl -u docker) may say more. The image itself is complete: --format oci has it.",
            )
    engine.tag(record.config_digest, tag)
    return True
