"""Images from and to a daemon: what it saves becomes layers of ours, and an OCI layout becomes an archive to load."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.image.docker.streams import Content, tar_stream
from envbuild.rootfs.gzip_writer import GzipWriter
from envbuild.rootfs.layer import Layer, LayerRecord

# Larger than any configuration or manifest.
SMALL_BYTES = 4 << 20
COPY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Saved:
    """An image that came out of a daemon: its configuration, byte for byte, and its layers, lowest first."""

    config: bytes
    layers: tuple[Layer, ...]


class _Reader(io.RawIOBase):
    """A file object of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            found = next(self._chunks, None)
            if found is None:
                return 0
            self._rest = found
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def unpack_saved(archive: Iterable[bytes], image_id: str, folder: Path, known: Mapping[str, Layer]) -> Saved:
    """Read an image as a daemon saves it; its layers are gzipped into ``folder`` while they come.

    The archive is docker's own (a folder a layer), or an OCI layout with docker's ``manifest.json``, as from newer
    daemons.

    Args:
        image_id: the digest of its configuration.
        known: layers that are there already, by the digests of their tars.

    Raises:
        CheckRefusedError: the archive is cut off, or is not of that image.
    """
    small: dict[str, bytes] = {}
    by_content: dict[str, Layer] = {}
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Reader(archive), COPY_BYTES), mode="r|") as tar:
            for number, member in enumerate(tar):
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                if member.size <= SMALL_BYTES:
                    small[member.name] = content.read()
                    if not _is_tar(small[member.name]):
                        continue
                    content = io.BytesIO(small[member.name])
                layer = _compress(content, folder / f"{number}.tar.gz")
                by_content[layer.record.diff_id] = layer
        manifest = jsonread.foreign(small["manifest.json"])
        config = small[manifest[0]["Config"]]
        wanted = list(jsonread.foreign(config)["rootfs"]["diff_ids"])
    except (tarfile.TarError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _refused(image_id, f"The archive cannot be read: {type(error).__name__}: {error}") from error
    if sha256_bytes(config) != image_id:
        raise _refused(image_id, f"The configuration in the archive is {sha256_bytes(config)}.")
    if absent := [diff_id for diff_id in wanted if diff_id not in by_content]:
        raise _refused(image_id, f"Layers of the configuration are not in the archive: {', '.join(absent)}.")
    chosen = [known.get(diff_id) or _named(by_content[diff_id], number) for number, diff_id in enumerate(wanted)]
    for layer in by_content.values():
        if layer.record.diff_id not in wanted or layer.record.diff_id in known:
            layer.file.unlink()
    return Saved(config=config, layers=tuple(chosen))


def _named(layer: Layer, number: int) -> Layer:
    return Layer(layer.record.model_copy(update={"name": f"docker-{number + 1}"}), layer.file)


def _is_tar(data: bytes) -> bool:
    """Whether it is a layer, and none of the descriptions beside them; an empty layer is two blocks of zeros."""
    return data[257:262] == b"ustar" or (len(data) >= tarfile.BLOCKSIZE and not data.strip(b"\0"))


class _Tee(io.RawIOBase):
    """Hands on what is read to a sink, too."""

    def __init__(self, content: Any, sink: GzipWriter) -> None:
        self._content = content
        self._sink = sink

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        chunk: bytes = self._content.read(size)
        self._sink.write(chunk)
        return chunk


def _compress(content: Any, file: Path) -> Layer:
    """A layer's tar, gzipped and counted in one go."""
    with GzipWriter(file) as gzip:
        tee = _Tee(content, gzip)
        with tarfile.open(fileobj=tee, mode="r|") as tar:
            entries = sum(1 for _ in tar)
        while tee.read(COPY_BYTES):
            pass
    record = LayerRecord(
        name="layer",
        digest=gzip.digest,
        diff_id=gzip.plain_digest,
        size_bytes=gzip.bytes,
        unpacked_bytes=gzip.plain_bytes,
        entries=entries,
    )
    return Layer(record, file)


def _refused(image_id: str, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the image that the daemon saved is not {image_id}",
        why=why,
        fix="Run the same command again; if it stays, look at the daemon's log.",
    )


def archive_of(config: bytes, layers: Mapping[str, Path], tag: str) -> Iterator[bytes]:
    """A docker archive of an image, made while it is read; the layers stay compressed.

    The configuration goes in byte for byte, so that the image has the same ID in every daemon.

    Args:
        layers: their files by their digests, lowest first.
    """
    name = f"{_hex(sha256_bytes(config))}.json"
    places = [f"{_hex(digest)}.tar.gz" for digest in layers]
    manifest: list[Json] = [{"Config": name, "RepoTags": [tag], "Layers": [*places]}]
    files: dict[str, Content] = dict(zip(places, layers.values(), strict=True))
    yield from tar_stream({**files, name: config, "manifest.json": canonical_json(manifest)})


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
