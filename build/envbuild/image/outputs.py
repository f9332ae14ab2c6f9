"""Images where people look for them: ``out/images/<stack>-<base>-<target>/``, linked from the store."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import locks
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import link_or_copy, machine_errors, remove_tree, replace_tree
from envbuild.image.record import RECORD_FILE, ImageRecord
from envbuild.store.seals import ALWAYS_READ_BYTES

OCI_DIR = "oci"
SQSH_FILE = "image.sqsh"
# Where images and certificates go when the command line says nothing else.
OUT_DIR = Path("out")


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
                fix=f"Build it: {_command(self)} --format oci,sqsh",
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
            fix=f"Build it first: {_image_command(out_dir, stack, base, target)} --format oci,sqsh",
        )
    return PlacedImage(path, ImageRecord.load(record))


def place(entry: Path, out_dir: Path, record: ImageRecord) -> tuple[PlacedImage, bool]:
    """Put a store entry into ``out_dir``; returns it and whether anything had to be done.

    Files are hard links where the disk allows it, so an image is kept once.
    """
    path = image_path(out_dir, record.stack, record.base, record.target)
    if _is_placed(entry, path):
        return PlacedImage(path, record), False
    # One at a time: whoever comes second would sweep away what the first is putting together.
    with locks.exclusive(path.with_name(f".{path.name}.lock")):
        if _is_placed(entry, path):
            return PlacedImage(path, record), False
        for leftover in [*path.parent.glob(f".{path.name}.new.*"), *path.parent.glob(f".{path.name}.old.*")]:
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
    """Whether ``path`` holds the entry: every file there is the entry's own, or has its size and time."""
    try:
        return all(_same(source, path / source.relative_to(entry)) for source in _files(entry))
    except FileNotFoundError:
        return False


def _same(source: Path, placed: Path) -> bool:
    ours, theirs = source.stat(), placed.stat()
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        return True
    if (ours.st_size, ours.st_mtime_ns) != (theirs.st_size, theirs.st_mtime_ns):
        return False
    return ours.st_size > ALWAYS_READ_BYTES or source.read_bytes() == placed.read_bytes()


def verify(image: PlacedImage) -> None:
    """Read the whole image and compare it with its record: every blob of the OCI layout, and the .sqsh if there is one.

    Raises:
        CheckRefusedError: a file is not the one that was built.
    """
    record = image.record
    blobs = image.path / OCI_DIR / "blobs/sha256"
    try:
        manifests = json.loads((image.path / OCI_DIR / "index.json").read_bytes())["manifests"]
        manifest = (blobs / record.oci_digest.removeprefix("sha256:")).read_bytes()
        config = json.loads(manifest)["config"]["digest"]
        layers = [layer["digest"] for layer in json.loads(manifest)["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_built(image, f"{OCI_DIR}: {error}") from error
    named = [record.oci_digest, *(report.manifest_digest for report in record.reports)]
    if [entry.get("digest") for entry in manifests] != named:
        raise _not_built(image, f"{OCI_DIR}/index.json does not name the image of the record, {record.oci_digest}")
    stated = [record.oci_digest, record.config_digest, *(layer.digest for layer in record.layers)]
    if [config, *layers] != stated[1:]:
        raise _not_built(image, "the manifest has other layers than the record")
    stated += [digest for report in record.reports for digest in (report.manifest_digest, report.digest)]
    files = {blobs / digest.removeprefix("sha256:"): digest for digest in stated}
    files |= {image.path / report.file: report.digest for report in record.reports}
    if record.sqsh:
        files[image.sqsh()] = record.sqsh.digest
    for file, digest in files.items():
        found = sha256_file(file) if file.is_file() else "no file"
        if found != digest:
            raise _not_built(image, f"{file.relative_to(image.path)}: the record states {digest}; there is {found}")


def _not_built(image: PlacedImage, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the image in {image.path} is not the one that was built", why=why, fix=f"Put it right: {_command(image)}"
    )


def _command(image: PlacedImage) -> str:
    record = image.record
    return _image_command(image.path.parent.parent, record.stack, record.base, record.target)


def _image_command(out_dir: Path, stack: str, base: str, target: str) -> str:
    """The command that puts an image into ``out_dir``."""
    words = ["envbuild", "image", "--stack", stack, "--base", base, "--target", target]
    return shlex.join(words if out_dir == OUT_DIR else [*words, "--out-dir", str(out_dir)])
