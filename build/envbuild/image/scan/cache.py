"""Scans in the store: a layer is read once, however many images have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from envbuild.core.digests import digest_of
from envbuild.core.files import write_atomic
from envbuild.core.text import printable
from envbuild.image.scan.models import FORMAT, LayerScan
from envbuild.image.scan.scan import read_layer
from envbuild.rootfs.members import Member
from envbuild.rootfs.stream import Content
from envbuild.store.local import LocalStore

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
