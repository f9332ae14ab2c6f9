"""Checks that a placed image is unchanged, without reading all of it each time.

A file that was read and found right is recognised by its inode, size, time and time of change (st_ctime), which no
program can set. Whatever moves these without changing the file (a link, another mode, a copy) costs one more reading.
"""

from __future__ import annotations

import os

from envbuild.core.digests import digest_of
from envbuild.core.errors import CheckRefusedError
from envbuild.image.output import PlacedImage, verify
from envbuild.store import entry_index
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE

KIND, FILE = "stamps", "stamps.json"

# By a file's name: inode, size, time and time of change; as text, since inodes may be larger than JSON's numbers.
Stamps = dict[str, str]


def verify_and_stamp(image: PlacedImage, store: LocalStore) -> None:
    """Read the whole image (see :func:`verify`), and record the stamps of its files.

    Raises:
        CheckRefusedError: a file is not the one that was built.
    """
    stamps: Stamps = {}

    def note(name: str, info: os.stat_result) -> bool:
        stamps[name] = _stamp(info)
        # The record is what the others are compared with.
        return name != RECORD_FILE

    # Before they are read: a file that changes meanwhile has another stamp afterwards.
    problem = entry_index.find_damage(image.path, note)
    verify(image)
    if not problem:
        _record(image, stamps, store)


def check_unchanged(image: PlacedImage, store: LocalStore) -> None:
    """Read the files whose stamps differ from those of the last check.

    Raises:
        CheckRefusedError: one was changed since the image was built.
    """
    known = _known(image, store)
    stamps: Stamps = {}

    def is_known(name: str, info: os.stat_result) -> bool:
        stamps[name] = _stamp(info)
        return known.get(name) == stamps[name]

    if problem := entry_index.find_damage(image.path, is_known):
        raise CheckRefusedError(
            f"the image in {image.path} is not the one that was certified",
            why=f"{problem} since it was built.",
            fix=f"Build it again: {image.command}",
        )
    if stamps != known:
        _record(image, stamps, store)


def _stamp(info: os.stat_result) -> str:
    return f"{info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


def _key(image: PlacedImage) -> str:
    return digest_of({"path": str(image.path.resolve()), "image": image.record.oci_digest})


def _known(image: PlacedImage, store: LocalStore) -> Stamps:
    path = store.find(KIND, _key(image))
    if path is None:
        return {}
    try:
        return dict(entry_index.read_json(path, FILE))
    except (ValueError, TypeError):
        return {}  # every file is read again


def _record(image: PlacedImage, stamps: Stamps, store: LocalStore) -> None:
    if store.is_writable:
        store.rebuild(KIND, _key(image), entry_index.json_writer(FILE, stamps))
