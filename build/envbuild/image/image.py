"""An image from its inputs to its place: built or found in the store, loaded into a daemon, placed in a directory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.image.build import BaseChoice, build_image
from envbuild.image.docker.load import engine_for, load_image
from envbuild.image.inputs import ImageInputs
from envbuild.image.output import PlacedImage, image_tag, place


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """A placed image, and what this call did.

    Attributes:
        engine: the daemon that has the image; None where none was asked for.
        tag: the image's name in a daemon.
    """

    image: PlacedImage
    built: bool
    placed: bool
    loaded: bool
    engine: str | None
    tag: str


def make_image(
    inputs: ImageInputs,
    formats: Collection[str],
    out_dir: Path,
    context: Context,
    *,
    lock_name: str | None = None,
    choice: BaseChoice = BaseChoice.USUAL,
) -> ImageResult:
    """Build an image where the store does not have it, load it into a daemon if asked for, and place it.

    Args:
        formats: ``oci`` (always made), ``sqsh`` and ``docker`` (in a daemon).
        lock_name: of a lock that is not the stack's own.
        choice: the base to build on.

    Raises:
        EnvbuildError: see :func:`build_image`, :func:`load_image` and :func:`place`.
    """
    selection = inputs.selection
    tag = image_tag(lock_name or selection.stack_name, selection.base_name, selection.target_name)
    # Before anything is built: a daemon that does not answer ends the command at once.
    engine = engine_for(formats)
    built = build_image(inputs, context, choice)
    loaded = engine is not None and load_image(engine, built.path, built.record, tag, context.reporter)
    image, placed = place(built.path, out_dir, built.record, lock_name)
    version = engine.version if engine else None
    return ImageResult(image=image, built=built.built, placed=placed, loaded=loaded, engine=version, tag=tag)
