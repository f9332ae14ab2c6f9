"""Surveys in the store: a layer is read once, however many images have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from envbuild.core.digests import digest_of
from envbuild.core.files import write_atomic
from envbuild.core.progress import Reporter
from envbuild.core.text import printable
from envbuild.image.scan.scan import FORMAT, LayerScan, survey
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.members import Member
from envbuild.rootfs.single_layer import members_of
from envbuild.rootfs.stream import Content
from envbuild.store.local import LocalStore

KIND = "layer-surveys"
SURVEY_FILE = "survey.json"
LISTING_FILE = "entries.jsonl"
Members: TypeAlias = Callable[[], "Iterator[tuple[Member, Content | None]]"]


@dataclass(frozen=True, kw_only=True)
class CachedScan:
    """What is known about a layer, and the file with its entries.

    Attributes:
        digest: of the layer as it is shipped.
    """

    name: str
    digest: str
    survey: LayerScan
    listing: Path


def survey_layer(layer: Layer, places: Sequence[str], store: LocalStore, reporter: Reporter) -> CachedScan:
    """The survey of a layer that was built here.

    Raises:
        CheckRefusedError: the layer is damaged.
    """
    record = layer.record
    blob = LayerBlob(
        file=layer.file,
        digest=record.digest,
        size_bytes=record.size_bytes,
        diff_id=record.diff_id,
        unpacked_bytes=record.unpacked_bytes,
    )
    return keep_survey(record.name, record.digest, lambda: members_of(blob), places, store, reporter)


def keep_survey(
    name: str,
    digest: str,
    members: Members,
    places: Sequence[str],
    store: LocalStore,
    reporter: Reporter,
    check: Callable[[], None] | None = None,
) -> CachedScan:
    """The survey of a layer; made when the store does not have it.

    Args:
        digest: of the layer as it is shipped, which reading its ``members`` must hold it to.
        check: holds the layer to its digest where the store has its survey, so that nobody reads it.

    Raises:
        CheckRefusedError: the layer is damaged, or another one.
    """
    key = digest_of({"format": FORMAT, "layer": digest, "places": tuple(sorted(places))})

    was_read = False

    def build(folder: Path) -> None:
        nonlocal was_read
        with reporter.step(f"read layer {printable(name)}"):
            found = survey(members(), folder / LISTING_FILE, places, folder.parent)
        write_atomic(folder / SURVEY_FILE, found.model_dump_json(indent=1) + "\n")
        was_read = True

    entry = store.get_or_build(KIND, key, build)
    if check and not was_read:
        with reporter.step(f"check layer {printable(name)}"):
            check()
    found = LayerScan.model_validate_json((entry.path / SURVEY_FILE).read_bytes())
    return CachedScan(name=name, digest=digest, survey=found, listing=entry.path / LISTING_FILE)
