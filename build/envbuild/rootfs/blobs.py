"""Layer blobs: opened by media type and first bytes, decompressed, compared with their digests while they are read."""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from isal import igzip_lib

from envbuild.core.digests import sha256_file
from envbuild.core.files import machine_errors
from envbuild.rootfs.members import Refusal, refusals

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_OCI = "application/vnd.oci.image.layer."
_DOCKER = "application/vnd.docker.image.rootfs."
# How a layer is packed, by what its media type ends with.
_ENDINGS = {"+gzip": "gzip", ".gzip": "gzip", "+zstd": "zstd", ".zstd": "zstd", ".tar": "a plain tar"}
MEDIA_TYPES = frozenset(
    [f"{_OCI}{kind}v1.tar{suffix}" for kind in ("", "nondistributable.") for suffix in ("", "+gzip", "+zstd")]
    + [f"{_DOCKER}{kind}diff.tar{suffix}" for kind in ("", "foreign.") for suffix in ("", ".gzip", ".zstd")]
)
# RFC 1952, section 2.3.1; RFC 8878, section 3.1.1.
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_COMPRESSED = ("gzip", "zstd")
_BLOCK_BYTES = 512
READ_BYTES = 1 << 18
CHUNK_BYTES = 1 << 20
CHUNKS_AHEAD = 8
STOP_SECONDS = 0.2
_DAMAGE = (cast("type[Exception]", igzip_lib.IsalError), zstd.ZstdError)
# Where it is not stated how much a layer unpacks to: more than this many times its size is a bomb.
MAX_RATIO = 200
FREE_BYTES = 4 << 30
_AGAIN = "Fetch or build the image again. If it stays, the copy at its source is damaged."


@dataclass(frozen=True, kw_only=True)
class LayerBlob:
    """A layer's file, and what is known about it; whatever is None is not checked."""

    file: Path
    digest: str | None = None
    size_bytes: int | None = None
    # Of the tar in it.
    diff_id: str | None = None
    media_type: str | None = None
    unpacked_bytes: int | None = None
    # What errors call it, where users know neither its digest nor its file.
    called: str = ""

    @property
    def title(self) -> str:
        """How errors call it."""
        return self.called or f"layer {self.digest or self.file}"

    @property
    def limit_bytes(self) -> int:
        """How much may come out of it."""
        if self.unpacked_bytes is not None:
            return self.unpacked_bytes
        return most_bytes(self.file.stat().st_size)


def most_bytes(packed_bytes: int) -> int:
    """How much may come out of a file of a size, where that is not stated."""
    return max(FREE_BYTES, MAX_RATIO * packed_bytes)


class _Decompressor(Protocol):
    """A decompressor of one stream, as Python's own are."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def open_blob(blob: LayerBlob) -> Generator[bytes]:
    """The tar in ``blob`` in pieces, read ahead by a thread; at its end the digests were compared.

    Raises:
        CheckRefusedError: unknown or wrong media type, wrong size or digest, damage, or a bomb.
        MachineError: the file cannot be read.
    """
    with refusals(blob.title):
        _check_known(blob)
        yield from _Ahead(lambda: _checked(blob)).pieces()


def check_media_type(blob: LayerBlob) -> None:
    """Compare a blob's first bytes with its media type: the digest does not cover it.

    Raises:
        CheckRefusedError: unknown or wrong media type, or wrong size.
        MachineError: the file cannot be read.
    """
    with refusals(blob.title):
        _check_known(blob)


def check_blob(blob: LayerBlob) -> None:
    """Compare a blob with what is known about it, without unpacking it: for who knows what is in it.

    Raises:
        CheckRefusedError: unknown or wrong media type, wrong size or digest.
        MachineError: the file cannot be read.
    """
    with refusals(blob.title):
        _check_known(blob)
        if blob.digest is not None:
            _compare(sha256_file(blob.file), blob.digest, "blob")


def _compare(actual: str, stated: str, name: str) -> None:
    if actual != stated:
        raise Refusal("", f"The digest of the {name} should be {stated} and is {actual}.", _AGAIN)


def _check_known(blob: LayerBlob) -> None:
    if blob.media_type is not None and blob.media_type not in MEDIA_TYPES:
        raise Refusal(
            "",
            f"Its media type is {blob.media_type!r}. Known are tars, plain, gzip or zstd, of OCI and docker.",
            "Convert the image with a tool that knows it, or use another one.",
        )
    with machine_errors(blob.file, "read"):
        size = blob.file.stat().st_size
    if blob.size_bytes is not None and size != blob.size_bytes:
        raise Refusal("", f"The manifest states {blob.size_bytes} bytes; the blob has {size}.", _AGAIN)
    if blob.media_type is not None:
        _check_packing(blob.file, blob.media_type)


def _check_packing(file: Path, media_type: str) -> None:
    """Programs that go by the media type must read the same as those that go by the first bytes."""
    with machine_errors(file, "read"), file.open("rb") as stream:
        first = stream.read(_BLOCK_BYTES)
    actual = _packing(first) if first else "empty"
    stated = next(packing for ending, packing in _ENDINGS.items() if media_type.endswith(ending))
    # An unknown packing is refused when it is read, after the digest was compared.
    if actual not in ("", stated) and (first or stated in _COMPRESSED):
        raise Refusal(
            "",
            f"Its media type {media_type} states {stated}; by its first bytes it is {actual}.",
            "Write the image anew with a tool that labels its layers right, as `skopeo copy` does, or use another one.",
        )


def _packing(first: bytes) -> str:
    """What a blob is by its first bytes; empty where it is nothing that is known."""
    if first.startswith(GZIP_MAGIC):
        return "gzip"
    if first.startswith(ZSTD_MAGIC):
        return "zstd"
    block = first[:_BLOCK_BYTES]
    # POSIX and GNU tars have the word at byte 257 of each header; an empty tar begins with its end, blocks of zeros.
    is_tar = len(block) == _BLOCK_BYTES and (block[257:262] == b"ustar" or not block.strip(b"\0"))
    return "a plain tar" if is_tar else ""


def _checked(blob: LayerBlob) -> Iterator[bytes]:
    packed = hashlib.sha256() if blob.digest else None
    plain = hashlib.sha256() if blob.diff_id else None
    why = f"{MAX_RATIO}:1" if blob.unpacked_bytes is None else "which is what its record states"
    for chunk in limited(_decompressed(_raw(blob.file, packed.update if packed else None)), blob.limit_bytes, why):
        if plain:
            plain.update(chunk)
        yield chunk
    for hashed, stated, name in ((packed, blob.digest, "blob"), (plain, blob.diff_id, "tar in it")):
        if hashed and stated:
            _compare(f"sha256:{hashed.hexdigest()}", stated, name)


def limited(chunks: Iterator[bytes], limit_bytes: int, why: str = f"{MAX_RATIO}:1") -> Iterator[bytes]:
    """The chunks, as long as they are not more than an honest file unpacks to; Refusal.

    Args:
        why: where the limit is from.
    """
    count = 0
    for chunk in chunks:
        count += len(chunk)
        if count > limit_bytes:
            raise Refusal(
                "",
                f"It unpacks to more than {limit_bytes} bytes, {why}.",
                "Nothing honest is packed so densely; do not use the image.",
            )
        yield chunk


def _raw(file: Path, seen: Callable[[bytes], None] | None) -> Iterator[bytes]:
    with machine_errors(file, "read"), file.open("rb", buffering=0) as stream:
        while data := stream.read(READ_BYTES):
            if seen:
                seen(data)
            yield data


def _decompressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    first = next(pieces, b"")
    match _packing(first):
        case "gzip":
            return _unpacked(_gzip_decompressor, "gzip", first, pieces)
        case "zstd":
            return _unpacked(zstd.ZstdDecompressor, "zstd", first, pieces)
        case packing:
            return _plain(first, pieces, is_tar=bool(packing))


def _plain(first: bytes, pieces: Iterator[bytes], *, is_tar: bool) -> Iterator[bytes]:
    if len(first) >= _BLOCK_BYTES and not is_tar:
        raise Refusal("", "It is neither a tar nor one compressed with gzip or zstd.", _AGAIN)
    yield first
    yield from pieces


def _unpacked(start: Callable[[], _Decompressor], what: str, data: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """One compressed stream after the other; zeros behind the last are padding."""
    engine = start()
    while True:
        try:
            chunk = engine.decompress(data, CHUNK_BYTES)
        except _DAMAGE as error:
            raise Refusal("", f"The {what} stream is damaged: {error}.", _AGAIN) from error
        data = b""
        if chunk:
            yield chunk
        if engine.eof:
            # A gzip file may have several members (RFC 1952, section 2.2; eStargz has one for each file), and zstd
            # several frames. gzip(1) and Python's gzip pass over zeros behind the last one, too.
            data = engine.unused_data.lstrip(b"\0") or _after_zeros(pieces)
            if not data:
                return
            engine = start()
        elif engine.needs_input:
            data = next(pieces, b"")
            if not data:
                raise Refusal("", f"The {what} stream ends too early.", _AGAIN)


def _gzip_decompressor() -> _Decompressor:
    # ISA-L may read: what rules it out for GzipWriter is the bytes that it writes. With this flag it also compares the
    # checksum behind the stream.
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)


def _after_zeros(pieces: Iterator[bytes]) -> bytes:
    return next((rest for piece in pieces if (rest := piece.lstrip(b"\0"))), b"")


class _Ahead:
    """Pieces made by a thread, a few ahead: decompressing and hashing let go of Python's lock."""

    def __init__(self, produce: Callable[[], Iterator[bytes]]) -> None:
        self._produce = produce
        self._ready: queue.Queue[bytes | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="read a layer", daemon=True)

    def pieces(self) -> Iterator[bytes]:
        """The pieces; the thread ends with them, or when the caller stops."""
        self._thread.start()
        try:
            while (piece := self._ready.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self._stopped.set()
            self._thread.join()

    def _work(self) -> None:
        try:
            for chunk in self._produce():
                if not self._put(chunk):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the pieces are read
            self._put(error)

    def _put(self, piece: bytes | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                # With a limit: after the reader stopped, nothing is taken any more, and the thread would wait without
                # end.
                self._ready.put(piece, timeout=STOP_SECONDS)
            except queue.Full:
                continue
            return True
        return False
