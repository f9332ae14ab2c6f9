"""One pass over a layer: its entries, and what its files show.

Each layer is read by itself: what an upper layer hides is shipped all the same. A scan is kept in the store, so that a
layer is read once, however many images have it.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import posixpath
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from envbuild.core.digests import digest_of
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.text import printable
from envbuild.image.scan import content as contents
from envbuild.image.scan.models import FAMILIES, FORMAT, FileEntry, GpuFile, Hit, LayerScan, Special
from envbuild.image.scan.packages import (
    COPYRIGHT,
    DIST_INFO,
    DPKG_INFO,
    DPKG_STATUS,
    PythonPackage,
    debian_digests,
    debian_files,
    debian_packages,
    from_elsewhere,
    merged_usr,
    python_package,
    recorded,
)
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.members import Kind, Member
from envbuild.rootfs.single_layer import members_of
from envbuild.rootfs.stream import Content
from envbuild.store.local import LocalStore
from envbuild.wheels.audit.binary import ELF_MAGIC
from envbuild.wheels.audit.fatbin import SECTIONS
from envbuild.wheels.audit.prebuilt import FileCode, read_code

PIECE_BYTES = 1 << 20
# Package metadata is read whole up to this size; dpkg's lists of files are long.
KEPT_BYTES = 64 << 20
GPU_MARKS = tuple(name.encode() for name in SECTIONS)
CAPABILITY = "security.capability"
KINDS = {
    Kind.FILE: "f",
    Kind.DIRECTORY: "d",
    Kind.SYMLINK: "l",
    Kind.HARD_LINK: "h",
    Kind.CHARACTER: "c",
    Kind.BLOCK: "b",
    Kind.FIFO: "p",
}


def scan_stored(layer: Layer, builder_paths: Sequence[str], store: LocalStore) -> CachedScan:
    """The scan of a layer that is made here; see :func:`scan_layer`."""
    return scan_layer(layer.record.name, layer.record.digest, partial(members_of, layer.blob), builder_paths, store)


def read_layer(
    members: Iterable[tuple[Member, Content | None]], listing: Path, builder_paths: Sequence[str], scratch: Path
) -> LayerScan:
    """Read a layer's members, and write its entries to ``listing`` (JSON, one a line).

    Args:
        builder_paths: folders of the building machine that no file may name.
        scratch: a folder for one file at a time.
    """
    reader = _Reader(builder_paths, scratch)
    with machine_errors(listing), listing.open("w", encoding="ascii") as lines:
        for member, content in members:
            lines.write(json.dumps(reader.entry(member, content)) + "\n")
    return reader.finish()


class _Reader:
    """The state of the pass until the layer's end."""

    def __init__(self, builder_paths: Sequence[str], scratch: Path) -> None:
        self._builder_paths, self._scratch = builder_paths, scratch
        self._entries = self._files = self._file_bytes = 0
        self._special: list[Special] = []
        self._secrets: list[Hit] = []
        self._places: list[Hit] = []
        self._gpu: list[FileCode] = []
        self._libraries: dict[str, list[str]] = {}
        # Of files with credentials: sha256 as RECORD has it, and MD5 as dpkg has it.
        self._digests: dict[str, tuple[str, str]] = {}
        self._dist_info: dict[str, dict[str, bytes]] = {}
        self._status: bytes | None = None
        self._lists: dict[str, bytes] = {}
        self._copyrights: dict[str, bytes] = {}

    def entry(self, member: Member, content: Content | None) -> FileEntry:
        path, kind, mode = member.name, KINDS[member.kind], member.mode
        capable = CAPABILITY in member.xattrs
        # On a directory the group bit only hands the group down, and the sticky bit keeps others' files safe.
        open_folder = kind == "d" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX
        if capable or open_folder or (kind == "f" and mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH)):
            self._special.append(Special(path=path, kind=kind, mode=mode, capabilities=capable))
        self._entries += 1
        return FileEntry(
            path=path,
            kind=kind,
            mode=mode,
            uid=member.uid,
            gid=member.gid,
            size=member.size if kind == "f" else 0,
            mtime=member.mtime,
            link=member.link,
            digest=self._content(path, content) if content is not None else "",
            xattrs=member.xattrs,
        )

    def _content(self, path: str, content: Content) -> str:
        """Read a file's content, piece by piece; returns its digest."""
        self._files += 1
        size = content.size
        self._file_bytes += size
        digest, search = hashlib.sha256(), contents.PathSearch(self._builder_paths)
        pieces = _gathered(content.pieces())
        first = next(pieces, b"")
        seen = _tee(first, pieces, digest.update, search.feed)
        if first.startswith(ELF_MAGIC):
            self._elf(path, seen)
        elif size <= (KEPT_BYTES if _is_metadata(path) else contents.SCANNED_BYTES):
            whole = b"".join(seen)
            self._text(path, whole, digest.digest())
        else:
            for _ in seen:
                pass
        search.end()
        self._places += [Hit(path=path, what=place) for place in sorted(search.paths)]
        return digest.hexdigest()

    def _elf(self, path: str, pieces: Iterator[bytes]) -> None:
        name = path.rpartition("/")[2]
        for family, pattern in FAMILIES.items():
            if pattern.match(name):
                self._libraries.setdefault(family, []).append(path)
        # Most have no GPU code, and reading their headers takes longer than all the rest of this pass.
        marked, before = False, b""
        # pyelftools seeks; a member of a tar can be read only once, in order.
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            for piece in pieces:
                file.write(piece)
                marked = marked or any(mark in before + piece for mark in GPU_MARKS)
                # A name of a section may lie across two pieces.
                before = piece[-max(map(len, GPU_MARKS)) :]
            if marked:
                file.flush()
                if code := read_code(file, path):
                    self._gpu.append(code)

    def _text(self, path: str, content: bytes, digest: bytes) -> None:
        if hits := contents.secrets(path, content):
            self._secrets += [Hit(path=path, what=what) for what in hits]
            # dpkg keeps MD5 alone (/var/lib/dpkg/info/*.md5sums).
            md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
            self._digests[path] = (base64.urlsafe_b64encode(digest).decode().rstrip("="), md5)
        if path == DPKG_STATUS:
            self._status = content
        elif path.startswith(DPKG_INFO):
            self._lists[path.removeprefix(DPKG_INFO)] = content
        elif match := COPYRIGHT.match(path):
            self._copyrights[match["package"]] = content
        elif match := DIST_INFO.match(path):
            self._dist_info.setdefault(match["folder"], {})[match["file"]] = content

    def finish(self) -> LayerScan:
        packages = {folder: python_package(folder, files) for folder, files in sorted(self._dist_info.items())}
        python = tuple(entry for entry in packages.values() if entry)
        digests, owners = self._recorded(python)
        debian_digest, listed = debian_digests(self._lists), debian_files(self._lists)

        def vouched(hit: Hit) -> Hit:
            sha256, md5 = self._digests[hit.path]
            known = digests.get(hit.path) == sha256 or debian_digest.get(merged_usr(hit.path)) == md5
            return hit.model_copy(update={"vouched": known})

        unknown = PythonPackage(name="", version="", folder="")
        gpu = [(owners.get(entry.file, unknown), entry) for entry in self._gpu]
        return LayerScan(
            entries=self._entries,
            files=self._files,
            file_bytes=self._file_bytes,
            python=python,
            debian=None if self._status is None else debian_packages(self._status, self._copyrights),
            special=tuple(
                entry.model_copy(update={"owned": merged_usr(entry.path) in listed}) for entry in self._special
            ),
            secrets=tuple(vouched(hit) for hit in self._secrets),
            places=tuple(self._places),
            gpu=tuple(GpuFile(package=entry.name, version=entry.version, code=code) for entry, code in gpu),
            libraries={family: tuple(sorted(paths)) for family, paths in sorted(self._libraries.items())},
        )

    def _recorded(self, python: Iterable[PythonPackage]) -> tuple[dict[str, str], dict[str, PythonPackage]]:
        """Digests of files by RECORDs of wheels, and the packages that bring files with GPU code."""
        digests: dict[str, str] = {}
        owners: dict[str, PythonPackage] = {}
        wanted = {*self._digests, *(file.file for file in self._gpu)}
        for package in python:
            above = package.folder.rpartition("/")[0]
            # A RECORD that was written while the package was built here is no evidence.
            pinned = not from_elsewhere(package.origin)
            for name, digest in recorded(self._dist_info[package.folder].get("RECORD", b"")):
                # RECORD has paths relative to site-packages, scripts as ../../../bin/NAME.
                path = posixpath.normpath(f"{above}/{name}")
                if path in wanted:
                    owners[path] = package
                    if pinned:
                        digests[path] = digest
        return digests, owners


def _gathered(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """The pieces put together to larger ones; what two small pieces share is found."""
    waiting: list[memoryview] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting, count = [], 0
    if waiting:
        yield b"".join(waiting)


def _tee(first: bytes, pieces: Iterable[bytes], *readers: Callable[[bytes], object]) -> Iterator[bytes]:
    """All pieces; each is shown to all readers."""
    for piece in itertools.chain([first], pieces):
        for reader in readers:
            reader(piece)
        yield piece


def _is_metadata(path: str) -> bool:
    return path == DPKG_STATUS or path.startswith(DPKG_INFO) or bool(COPYRIGHT.match(path) or DIST_INFO.match(path))


# Names and keys from when a scan was a survey: under others, every layer in a store would be read again.
KIND = "layer-surveys"
SCAN_FILE = "survey.json"
LISTING_FILE = "entries.jsonl"
Members: TypeAlias = Callable[[], "Iterator[tuple[Member, Content | None]]"]


@dataclass(frozen=True, kw_only=True)
class CachedScan:
    """A layer's scan, and the file with its entries.

    Attributes:
        digest: of the layer as it is shipped.
    """

    name: str
    digest: str
    scan: LayerScan
    listing: Path


def scan_layer(
    name: str,
    digest: str,
    members: Members,
    builder_paths: Sequence[str],
    store: LocalStore,
    check: Callable[[], None] | None = None,
) -> CachedScan:
    """The scan of a layer; made when the store does not have it.

    Args:
        digest: of the layer as it is shipped, which reading its ``members`` must hold it to.
        builder_paths: folders of the building machine that no file may name.
        check: compares the layer with its digest where the store has its scan and the members are not read.

    Raises:
        CheckRefusedError: the layer is damaged, or another one.
    """
    key = digest_of({"format": FORMAT, "layer": digest, "places": tuple(sorted(builder_paths))})
    was_read = False

    def build(folder: Path) -> None:
        nonlocal was_read
        with store.reporter.step(f"read layer {printable(name)}"):
            scan = read_layer(members(), folder / LISTING_FILE, builder_paths, folder.parent)
        write_atomic(folder / SCAN_FILE, scan.model_dump_json(indent=1) + "\n")
        was_read = True

    entry = store.get_or_build(KIND, key, build)
    # Reading the members compares the digest too; a scan from the store does not show that this copy of the layer is
    # whole.
    if check and not was_read:
        with store.reporter.step(f"check layer {printable(name)}"):
            check()
    scan = LayerScan.model_validate_json((entry.path / SCAN_FILE).read_bytes())
    return CachedScan(name=name, digest=digest, scan=scan, listing=entry.path / LISTING_FILE)
