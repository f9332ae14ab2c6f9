"""Packs layers into a .sqsh that enroot starts: streamed to mksquashfs, without an unpacked copy."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.digests import sha256_file
from envbuild.core.errors import BuildError, MachineError, disk_full
from envbuild.core.exit_status import describe_status, ran_out_of_space, tail
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished, ProcessOptions, answer, find_tool, run, stream
from envbuild.image.record import SqshRecord
from envbuild.image.squashfs import compression as compressions
from envbuild.image.squashfs import enroot
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.read import require_reader
from envbuild.image.squashfs.tar_stream import DuplicateMemberError, write_stream
from envbuild.oci.models import BaseConfig, RunConfig
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.overlay import Places, superseded_in

# Raised when a .sqsh packed from the same layers would come out differently.
FORMAT = 2
# mksquashfs takes a quarter of the machine's memory for its buffers by default. More makes it no faster.
BUFFER_MEBIBYTES = 256
# What a pipe holds: fewer, larger pieces. An ordinary user gets no more (/proc/sys/fs/pipe-max-size).
PIPE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a .sqsh is packed.

    Attributes:
        readable: the compressions that the cluster's nodes can read; empty when that is not known.
    """

    compression: Compression = compressions.DEFAULT
    readable: tuple[str, ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether the nodes can read a .sqsh packed in this way."""
        return not self.readable or self.compression.name in self.readable

    def key(self) -> tuple[str, ...]:
        """Its part of the key of an image with a .sqsh.

        Raises:
            MachineError: mksquashfs is not installed.
        """
        return str(FORMAT), mksquashfs_version(), *self.compression.options()


@dataclass(frozen=True, kw_only=True)
class SqshSource:
    """What a .sqsh is packed from.

    Attributes:
        layers: the image's, lowest first.
        provenance: where the image came from, for the first line of ``/etc/rc``.
        epoch: the time of the file system and of enroot's files.
    """

    layers: Sequence[LayerBlob]
    config: RunConfig
    provenance: str
    epoch: int


def find_mksquashfs() -> Path:
    """The program that packs.

    Raises:
        MachineError: it is not installed.
    """
    return find_tool("mksquashfs", "squashfs-tools")


def check_base(config: BaseConfig) -> None:
    """Refuse a base as soon as it is known, when its images cannot go into a .sqsh.

    Raises:
        CheckRefusedError: its working directory or a volume would be run or mounted.
    """
    enroot.check(RunConfig(workdir=config.workdir, volumes=config.volumes))


@functools.cache
def mksquashfs_version() -> str:
    """``mksquashfs version 4.5.1 (2022/03/17)``: the same tool gives the same bytes, another may not."""
    # 4.6 and later exit with status 0, earlier ones with 0 or 1.
    output = answer([find_mksquashfs(), "-version"], what="ask mksquashfs for its version", statuses=(0, 1))
    return output.splitlines()[0] if output else "mksquashfs of unknown version"


def write_sqsh(
    target: Path, source: SqshSource, log: Path, compression: Compression = compressions.DEFAULT
) -> SqshRecord:
    """Pack an image and enroot's files into ``target``, and read it back.

    Once, mksquashfs 4.5.1 ended well on a busy machine and left a block of 4 GB that does not decompress, under the
    digest that was then recorded; the same stream packed again was whole. So what cannot be read is packed once more.

    Raises:
        CheckRefusedError: a layer is refused, or enroot would run something of the configuration as code.
        BuildError: mksquashfs failed, or what it wrote cannot be read.
        MachineError: it is not installed, or the disk is full.
    """
    require_reader()
    try:
        _write(target, source, log, compression)
        try:
            _read_back(target)
        except BuildError:
            _write(target, source, log, compression)
            _read_back(target)
    except BaseException:
        # Half a file is large and of no use. Before mksquashfs began, there may be a directory of that name.
        with contextlib.suppress(OSError):
            target.unlink()
        raise
    with machine_errors(target):
        return SqshRecord(
            digest=sha256_file(target),
            size_bytes=target.stat().st_size,
            packed_by=mksquashfs_version(),
            compression=" ".join(compression.options()),
        )


def _write(target: Path, source: SqshSource, log: Path, compression: Compression) -> None:
    try:
        finished = _pack(target, source, log, compression)
    # Rare, and found only on the way: finding such members first would read all layers twice for every image.
    except DuplicateMemberError:
        finished = _pack(target, source, log, compression, superseded_in(source.layers))
    if finished.status != 0:
        raise _failure(finished, target, compression, log)


def _read_back(target: Path) -> None:
    """Decompress all of it: a squashfs has no checksums, and its digest is of what was written, right or wrong."""
    fix = "Build it again. If it happens again, test the memory and the disk of this machine."
    reading = stream([require_reader(), target.absolute()], what="read the new .sqsh back", error=BuildError, fix=fix)
    with contextlib.closing(reading) as pieces:
        for _ in pieces:
            pass


def _failure(finished: Finished, target: Path, compression: Compression, log: Path) -> BuildError | MachineError:
    if ran_out_of_space(finished.output, target.parent):
        return disk_full(target.parent)
    if f'Compressor "{compression.name}" is not supported' in finished.output:
        return MachineError(
            f"this machine's mksquashfs cannot compress with {compression.name}",
            why=tail(finished.output, 3),
            fix="Choose another --sqsh-compression, or install a squashfs-tools that was built with it.",
            log=log,
        )
    return BuildError(
        f"cannot pack the .sqsh: mksquashfs {describe_status(finished.status)}",
        why=tail(finished.output),
        fix="See the log.",
        log=log,
    )


def _pack(target: Path, source: SqshSource, log: Path, compression: Compression, superseded: Places = ()) -> Finished:
    extra = enroot.files(source.config, source.provenance)
    command: list[str | Path] = [find_mksquashfs(), "-", target, "-tar", *compression.options()]
    # As `enroot import` leaves them: all of root, no extended attributes (file capabilities are lost, set-user-ID bits
    # stay).
    # Unless told otherwise, it also adds to a file that is there, and passes over some errors (its help).
    command += ["-all-root", "-no-xattrs", "-root-mode", "755", "-noappend", "-no-progress", "-exit-on-error"]
    command += ["-mem", f"{BUFFER_MEBIBYTES}M"]
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # where a user has very many pipes
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def feed() -> None:
        """Write the merged image as a tar into the pipe while mksquashfs reads it."""
        # Of one that ends early its own status says why.
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb", buffering=PIPE_BYTES) as pipe:
            write_stream(pipe, source.layers, extra, source.config.workdir, source.epoch, superseded)

    with ThreadPoolExecutor(1, "feed mksquashfs") as pool:
        feeding = pool.submit(feed)
        try:
            finished = run(
                command,
                what="pack the .sqsh",
                log=log,
                check=False,
                options=ProcessOptions(
                    # Without it the time of the file system and of its root is now. With -mkfs-time as well, it gives
                    # up.
                    env={"PATH": os.environ.get("PATH", os.defpath), "SOURCE_DATE_EPOCH": str(source.epoch)},
                    stdin=reading,
                ),
            )
        finally:
            # Ends the feeder if mksquashfs ended first: it writes into a pipe without a reader.
            os.close(reading)
        feeding.result()
    return finished
