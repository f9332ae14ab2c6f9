"""Packs layers into a .sqsh that enroot starts: streamed to mksquashfs, without an unpacked copy."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

from envbuild.core.digests import sha256_file
from envbuild.core.errors import BuildError, InternalError, MachineError, disk_full
from envbuild.core.files import machine_errors
from envbuild.core.process import describe_status, find_tool, ran_out_of_space, run, tail
from envbuild.image import enroot
from envbuild.image.oci import RunConfig
from envbuild.image.record import SqshRecord
from envbuild.image.tars import TarWriter, damage_refused, read_members

# zstd: half the size of enroot's default at the same speed; every squashfs reader since 4.4 knows it.
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "3")
# mksquashfs takes a quarter of the machine's memory for its buffers unless told.
BUFFER_MEBIBYTES = 512


@cache
def mksquashfs_version() -> str:
    """``mksquashfs version 4.5.1 (2022/03/17)``: the same tool gives the same bytes, another may not."""
    tool = find_tool("mksquashfs", "squashfs-tools")
    # 4.6 and later exit with status 0, earlier ones with 0 or 1.
    output = run([tool, "-version"], what="ask mksquashfs for its version", error=MachineError, check=False).output
    return output.splitlines()[0] if output else "mksquashfs of unknown version"


def write_sqsh(
    target: Path, layers: Sequence[Path], config: RunConfig, provenance: str, epoch: int, log: Path
) -> SqshRecord:
    """Pack ``layers`` (lowest first) and enroot's files into ``target``.

    Raises:
        BuildError: mksquashfs failed.
        MachineError: it is not installed, or the disk is full.
    """
    words: list[str | Path] = [
        find_tool("mksquashfs", "squashfs-tools"),
        "-",
        target,
        "-tar",
        *COMPRESSION,
        "-all-root",
        "-no-xattrs",
    ]
    words += ["-root-mode", "755", "-noappend", "-no-progress", "-exit-on-error", "-mem", f"{BUFFER_MEBIBYTES}M"]
    reading, writing = os.pipe()
    feeder = _Feeder(writing, layers, enroot.files(config, provenance), config.workdir, epoch)
    feeder.start()
    try:
        finished = run(
            words,
            what="pack the .sqsh",
            log=log,
            # Without it the time of the file system and of its root is now.
            env={"PATH": os.environ.get("PATH", os.defpath), "SOURCE_DATE_EPOCH": str(epoch)},
            stdin=reading,
            check=False,
        )
    finally:
        # Ends the feeder if mksquashfs ended first: nobody reads any more.
        os.close(reading)
        feeder.join()
    if feeder.problem is not None:
        raise feeder.problem
    if finished.status != 0:
        if ran_out_of_space(finished.output, target.parent):
            raise disk_full(target.parent)
        raise BuildError(
            f"cannot pack the .sqsh: mksquashfs {describe_status(finished.status)}",
            why=tail(finished.output),
            fix="See the log.",
            log=log,
        )
    with machine_errors(target):
        return SqshRecord(
            digest=sha256_file(target),
            size_bytes=target.stat().st_size,
            packed_by=mksquashfs_version(),
            compression=" ".join(COMPRESSION),
        )


class _Feeder(threading.Thread):
    """Writes the merged image as a tar into a pipe while mksquashfs reads it."""

    def __init__(
        self, descriptor: int, layers: Sequence[Path], extra: dict[str, bytes], workdir: str, epoch: int
    ) -> None:
        super().__init__(name="feed mksquashfs", daemon=True)
        self._descriptor = descriptor
        self._layers = layers
        self._extra = extra
        self._workdir = workdir
        self._epoch = epoch
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            with os.fdopen(self._descriptor, "wb", buffering=1 << 20) as pipe:
                write_merged(pipe, self._layers, self._extra, self._workdir, self._epoch)
        except BrokenPipeError:
            return  # mksquashfs ended early, and its own status says why
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.problem = error


def write_merged(stream: BinaryIO, layers: Sequence[Path], extra: dict[str, bytes], workdir: str, epoch: int) -> None:
    """Write one tar with the content of ``layers`` (lowest first) as enroot would lay it out, and ``extra`` files.

    The uppermost comes first, so that one pass over each layer is enough: what was written once is left out later.
    mksquashfs takes a directory's attributes whenever they come.
    """
    written: set[str] = set()
    tar = TarWriter(stream)
    for name, data in extra.items():
        member = _member(name, tarfile.REGTYPE, 0o644, epoch)
        member.size = len(data)
        tar.add(member, io.BytesIO(data))
        written.add(name)
    for layer in reversed(layers):
        with damage_refused(layer):
            written |= _write_layer(tar, layer, written)
    for folder in _with_parents(workdir.strip("/")):
        if folder not in written:
            tar.add(_member(folder, tarfile.DIRTYPE, 0o755, epoch))
    tar.close()


def _write_layer(tar: TarWriter, layer: Path, written: set[str]) -> set[str]:
    """Write the members of a layer that are not in ``written``; returns their names."""
    here: set[str] = set()
    for member, content in read_members(layer):
        if member.name in written or member.name.startswith(enroot.DROPPED_BELOW):
            continue
        if member.islnk() and member.linkname not in here:
            raise InternalError(f"{member.name} is a hard link to {member.linkname}, which an upper layer has")
        here.add(member.name)
        member.uid = member.gid = 0
        member.mode = enroot.mode(member.mode, directory=member.isdir())
        tar.add(member, content)
    return here


def _with_parents(folder: str) -> list[str]:
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _member(name: str, kind: bytes, mode: int, epoch: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, epoch
    return member
