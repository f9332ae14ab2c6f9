"""Images where people look for them: ``out/images/<stack>-<base>-<target>/``, linked from the store."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import ConfigurationError
from envbuild.core.files import link_or_copy, machine_errors, remove_tree, replace_tree
from envbuild.image.record import RECORD_FILE, ImageRecord

OCI_DIR = "oci"
SQSH_FILE = "image.sqsh"


@dataclass(frozen=True)
class PlacedImage:
    """An image in an output directory: ``oci/`` (an OCI layout), ``image.sqsh``, and the record of both."""

    path: Path
    record: ImageRecord

    def sqsh(self) -> Path:
        """The .sqsh file.

        Raises:
            ConfigurationError: the image was built without one, or the file is gone.
        """
        file = self.path / SQSH_FILE
        if self.record.sqsh_digest is None or not file.is_file():
            raise ConfigurationError(
                f"there is no .sqsh in {self.path}",
                why="The image was built without one." if self.record.sqsh_digest is None else f"{file} is gone.",
                fix=f"Build it: envbuild image --stack {self.record.stack} --base {self.record.base} "
                f"--target {self.record.target} --format oci,sqsh",
            )
        return file


def image_path(out_dir: Path, stack: str, base: str, target: str) -> Path:
    """Where the image of a stack on a base for a target is put."""
    return out_dir / "images" / f"{stack}-{base}-{target}"


def find_image(out_dir: Path, stack: str, base: str, target: str) -> PlacedImage:
    """The image that was put into an output directory.

    Raises:
        ConfigurationError: there is none; says how to make it.
    """
    path = image_path(out_dir, stack, base, target)
    record = path / RECORD_FILE
    if not record.is_file():
        raise ConfigurationError(
            f"there is no image of stack {stack} on base {base} for target {target}",
            why=f"{record} does not exist.",
            fix=f"Build it first: envbuild image --stack {stack} --base {base} --target {target} --format oci,sqsh",
        )
    return PlacedImage(path, ImageRecord.load(record))


def place(entry: Path, out_dir: Path, record: ImageRecord) -> tuple[PlacedImage, bool]:
    """Put a store entry into ``out_dir``; returns it and whether anything had to be done.

    Files are hard links where the disk allows it, so an image is kept once.
    """
    path = image_path(out_dir, record.stack, record.base, record.target)
    if _is_placed(entry, path):
        return PlacedImage(path, record), False
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*"):
        remove_tree(leftover)
    with machine_errors(path):
        staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    try:
        staged.chmod(0o755)
        for source in _files(entry):
            link_or_copy(source, staged / source.relative_to(entry))
        replace_tree(staged, path)
    finally:
        remove_tree(staged)
    return PlacedImage(path, record), True


def _files(entry: Path) -> list[Path]:
    return sorted(path for path in entry.rglob("*") if path.is_file())


def _is_placed(entry: Path, path: Path) -> bool:
    """Whether ``path`` holds the entry: every file there with the same size, the records equal."""
    try:
        return (path / RECORD_FILE).read_bytes() == (entry / RECORD_FILE).read_bytes() and all(
            (path / source.relative_to(entry)).stat().st_size == source.stat().st_size for source in _files(entry)
        )
    except FileNotFoundError:
        return False
