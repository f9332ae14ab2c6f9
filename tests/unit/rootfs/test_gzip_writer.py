"""The parallel gzip: readable by everyone, and the same bytes whatever the machine."""

import os
import random
import threading

import pytest

from envbuild.core.errors import MachineError
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.gzip_writer import BLOCK_BYTES, GzipWriter


def content(size: int) -> bytes:
    """Half of it compresses, with matches that reach back over the border of blocks."""
    noise = random.Random(size).randbytes(4096)
    return (noise + b"words " * 700)[: size or None] * (size // 8000 + 1) if size else b""


def compress(path, pieces) -> GzipWriter:
    with GzipWriter(path) as writer:
        for piece in pieces:
            writer.write(piece)
    return writer


@pytest.mark.parametrize("processors", [1, 3, 16])
def test_gzip_does_not_depend_on_the_number_of_processors(tmp_path, monkeypatch, processors):
    data = content(BLOCK_BYTES * 9)
    compress(tmp_path / "here.gz", [data])
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    compress(tmp_path / "there.gz", [data])
    assert (tmp_path / "here.gz").read_bytes() == (tmp_path / "there.gz").read_bytes()


def test_gzip_does_not_depend_on_how_the_data_comes(tmp_path):
    data = content(BLOCK_BYTES * 2 + 5)
    compress(tmp_path / "whole.gz", [data])
    compress(tmp_path / "pieces.gz", [data[i : i + 99_991] for i in range(0, len(data), 99_991)])
    assert (tmp_path / "whole.gz").read_bytes() == (tmp_path / "pieces.gz").read_bytes()


def test_gzip_blocks_use_what_came_before(tmp_path):
    """Without the window of the block before, repeated noise would not shrink at block borders."""
    noise = random.Random(1).randbytes(gzip_writer.WINDOW_BYTES // 2)
    block = noise * (BLOCK_BYTES // len(noise))
    alone = compress(tmp_path / "one.gz", [block]).bytes
    assert compress(tmp_path / "four.gz", [block * 4]).bytes < 4 * alone - 2 * len(noise)


@pytest.mark.parametrize("blocks", [1, 40], ids=["at the end", "before"])
def test_gzip_full_disk_is_named_and_nothing_stays_open(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "x.gz").symlink_to("/dev/full")
    before = {*threading.enumerate()}
    with pytest.raises(MachineError, match=r"is full$"), GzipWriter(tmp_path / "x.gz") as writer:
        writer.write(random.Random(2).randbytes(blocks * BLOCK_BYTES))
    assert writer._stream.closed
    assert {*threading.enumerate()} <= before


def test_gzip_has_the_bytes_that_other_machines_write(tmp_path):
    """A digest written down: another one here means another version of zlib-ng, or a processor that changes bytes."""
    words = random.Random(1)
    text = b"".join(
        words.choice([b"layer ", b"of ", b"torch\n", bytes([words.randrange(256)])]) for _ in range(400_000)
    )
    writer = compress(tmp_path / "x.gz", [text])
    assert (gzip_writer.ENCODER, writer.digest) == (
        "zlib-ng 2.3.3 level 2",
        "sha256:c57f0cd06c542c1d854de81f365f8467ce4536c632f4da9a4e798bbf59b9f71b",
    )
