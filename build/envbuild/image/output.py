"""Images where people look for them: ``out/images/<lock>-<base>-<target>/``, copied from the store."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import locks
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import (
    clone_or_copy,
    machine_errors,
    refuse_unwritable,
    remove_tree,
    replace_tree,
    write_atomic,
)
from envbuild.image.output_folder import make_readable, refuse_extra, refuse_foreign
from envbuild.image.record import ImageRecord
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.layout import open_layout
from envbuild.oci.models import INDEX_FILE, Index, Manifest
from envbuild.oci.write import retagged
from envbuild.store.entry_index import ALWAYS_READ_BYTES, ENTRY_INDEX_FILE, index_with, mark_changed
from envbuild.store.record import RECORD_FILE, dump, load

OCI_DIR = "oci"
SQSH_FILE = "image.sqsh"
# Where images and certificates go by default.
OUT_DIR = Path("out")


@dataclass(frozen=True)
class PlacedImage:
    """An image in an output directory: ``oci/`` (an OCI layout), ``image.sqsh``, and the record of both.

    Attributes:
        lock_name: of the lock under which it was placed; that of the stack where it is the stack's own.
    """

    path: Path
    record: ImageRecord
    lock_name: str

    @property
    def name(self) -> str:
        """What it is called where it was put, and in certificates."""
        return image_name(self.lock_name, self.record.base, self.record.target)

    @property
    def command(self) -> str:
        """The command that puts it there."""
        return self.command_of("image")

    def command_of(self, subcommand: str) -> str:
        """That command of envbuild about this image."""
        record, out_dir = self.record, self.path.parent.parent
        return _command_of(subcommand, out_dir, record.stack, record.base, record.target, self.lock_name)

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
                fix=f"Build it: {self.command} --format oci,sqsh",
            )
        return file


def image_name(lock_name: str, base: str, target: str) -> str:
    """What the image of a lock on a base for a target is called; a lock has its stack's name, or one of its own."""
    return f"{lock_name}-{base}-{target}"


def image_tag(lock_name: str, base: str, target: str) -> str:
    """The name of an image in a daemon: ``<lock>:<base>-<target>``; a lock has its stack's name, or one of its own."""
    return f"{lock_name}:{base}-{target}"


def image_path(out_dir: Path, lock_name: str, base: str, target: str) -> Path:
    """Where the image of a lock on a base for a target is put."""
    return out_dir / "images" / image_name(lock_name, base, target)


def find_image(out_dir: Path, stack: str, base: str, target: str, lock_name: str | None = None) -> PlacedImage:
    """The image that was put into an output directory.

    Args:
        lock_name: of a lock that is not the stack's own (``envbuild lock --name``).

    Raises:
        ConfigurationError: there is none.
    """
    lock_name = lock_name or stack
    path = image_path(out_dir, lock_name, base, target)
    record = path / RECORD_FILE
    if not record.is_file():
        named = "" if lock_name == stack else f", lock {lock_name}"
        raise ConfigurationError(
            f"there is no image of stack {stack} on base {base} for target {target}{named}",
            why=f"{record} does not exist.",
            fix=f"Build it first: {_command_of('image', out_dir, stack, base, target, lock_name)} --format oci,sqsh",
        )
    return PlacedImage(path, load(record, ImageRecord), lock_name)


def place(entry: Path, out_dir: Path, record: ImageRecord, lock_name: str | None = None) -> tuple[PlacedImage, bool]:
    """Put a store entry into ``out_dir``; returns it and whether anything had to be done.

    Its tag and the target in its record are those of the place. Every account may read them, whatever the umask.

    Args:
        lock_name: see :func:`find_image`. The same image may be there under several.

    Raises:
        ConfigurationError: there is something that envbuild did not put there, and that would be lost.
        MachineError: it cannot be written.
    """
    path = image_path(out_dir, lock_name or record.stack, record.base, record.target)
    image = PlacedImage(path, record, lock_name or record.stack)
    own = _own_files(entry, record, path.name)
    if _is_placed(entry, own, path):
        return image, False
    # One at a time: a second process would remove what the first one is writing.
    with locks.exclusive(path.with_name(f".{path.name}.lock")):
        if _is_placed(entry, own, path):
            return image, False
        refuse_extra(path)
        # Of processes that were killed: with the lock held, no other one is at work here.
        for leftover in [*path.parent.glob(f".{path.name}.new.*"), *path.parent.glob(f".{path.name}.old.*")]:
            remove_tree(leftover)
        with machine_errors(path):
            staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
        try:
            for source in _shared_files(entry, own):
                clone_or_copy(source, staged / source.relative_to(entry))
            for name, data in own.items():
                write_atomic(staged / name, data)
            make_readable(staged)
            replace_tree(staged, path)
        finally:
            remove_tree(staged)
    return image, True


def check_place(out_dir: Path, lock_name: str, base: str, target: str) -> None:
    """Before work starts: refuse a place where the image could not be put.

    Raises:
        ConfigurationError: something else than an image is there.
        MachineError: it cannot be written.
    """
    path = image_path(out_dir, lock_name, base, target)
    refuse_foreign(path)
    with machine_errors(path):
        # Where an image is already, there is most often nothing to write.
        if not (path / RECORD_FILE).is_file():
            refuse_unwritable(path)


def _own_files(entry: Path, record: ImageRecord, tag: str) -> dict[str, bytes]:
    """The files of a placed image that are not the store's: they name the target."""
    index = f"{OCI_DIR}/{INDEX_FILE}"
    own = {RECORD_FILE: dump(record)}
    with machine_errors(entry, "read"):
        if (entry / index).is_file():
            own[index] = retagged((entry / index).read_bytes(), tag)
        return {**own, ENTRY_INDEX_FILE: index_with(entry, own)}


def _shared_files(entry: Path, own: Mapping[str, bytes]) -> list[Path]:
    files = sorted(path for path in entry.rglob("*") if path.is_file())
    return [path for path in files if path.relative_to(entry).as_posix() not in own]


def _is_placed(entry: Path, own: Mapping[str, bytes], path: Path) -> bool:
    """Whether ``path`` holds the entry: every file there is the entry's own, or has its size and time."""
    try:
        return all((path / name).read_bytes() == data for name, data in own.items()) and all(
            _same(source, path / source.relative_to(entry)) for source in _shared_files(entry, own)
        )
    except (FileNotFoundError, NotADirectoryError):
        return False


def _same(source: Path, placed: Path) -> bool:
    ours, theirs = source.stat(), placed.stat()
    # Earlier versions made hard links, by which whoever owns the place can write into the store.
    if os.path.samestat(ours, theirs):
        return False
    # A copy keeps the time, so layers and the .sqsh (gigabytes) are not read at each call; small files are.
    if (ours.st_size, ours.st_mtime_ns) != (theirs.st_size, theirs.st_mtime_ns):
        return False
    return ours.st_size > ALWAYS_READ_BYTES or source.read_bytes() == placed.read_bytes()


def verify(image: PlacedImage) -> None:
    """Read the whole image and compare it with its record: every blob of the OCI layout, and the .sqsh if there is one.

    Raises:
        CheckRefusedError: a file is not the one that was built.
    """
    record = image.record
    layout = FolderFiles(image.path / OCI_DIR)
    # In the order in which they were written: the image, then what was attached to it (sbom.referrers).
    named = [record.oci_digest, *(report.manifest_digest for report in record.reports)]
    stated = [record.oci_digest, record.config_digest, *(layer.digest for layer in record.layers)]
    try:
        listed = [entry.digest for entry in layout.parse(INDEX_FILE, Index).manifests]
        # What copies an image by its tag reads index.json, which no digest covers.
        if listed != named:
            raise _not_built(image, f"{OCI_DIR}/index.json does not name the image of the record, {record.oci_digest}")
        manifest = layout.parse(blob_path(record.oci_digest), Manifest)
        if [manifest.config.digest, *(layer.digest for layer in manifest.layers)] != stated[1:]:
            raise _not_built(image, "the manifest has other layers than the record")
        # For what it refuses: an index that shows other programs another image, and reports that are not whole
        # (oci/index.py).
        open_layout(layout, "")
    except CheckRefusedError as error:
        raise _not_built(image, error.why) from error
    stated += [digest for report in record.reports for digest in (report.manifest_digest, report.digest)]
    files = {image.path / OCI_DIR / blob_path(digest): digest for digest in stated}
    files |= {image.path / report.file: report.digest for report in record.reports}
    if record.sqsh:
        files[image.sqsh()] = record.sqsh.digest
    for file, digest in files.items():
        actual = sha256_file(file) if file.is_file() else "no file"
        if actual != digest:
            # Without the fixed time, the command that puts it right does not take it for what is in the store.
            mark_changed(file)
            raise _not_built(image, f"{file.relative_to(image.path)}: the record states {digest}; there is {actual}")


def _not_built(image: PlacedImage, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the image in {image.path} is not the one that was built", why=why, fix=f"Put it right: {image.command}"
    )


def _command_of(subcommand: str, out_dir: Path, stack: str, base: str, target: str, lock_name: str) -> str:
    """A command about an image of ``out_dir``."""
    words = ["envbuild", subcommand, "--stack", stack, "--base", base, "--target", target]
    words += [] if lock_name == stack else ["--name", lock_name]
    return shlex.join(words if out_dir == OUT_DIR else [*words, "--out-dir", str(out_dir)])
