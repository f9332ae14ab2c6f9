"""What the store keeps: for a lock, for the last nights, for a tag."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.ledger_rows import image_row, night_row, publication_row, step_row
from helpers.locks import make_lock
from helpers.placed_images import RECORD

from envbuild.core.progress import SilentReporter
from envbuild.image.record import EnvironmentLayerRecord, EnvironmentRecord
from envbuild.ledger.ledger import Ledger
from envbuild.nightly.gc import unneeded_entries, what_stays
from envbuild.publish.collect import Needs
from envbuild.rootfs.layer import LayerRecord
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump


def key(number: int) -> str:
    return f"sha256:{number:064x}"


def layer(number: int) -> LayerRecord:
    return LayerRecord(
        name=f"l{number}", digest=key(100 + number), diff_id=key(1), size_bytes=7, unpacked_bytes=7, entries=1
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Two images, of the layers 1 and 2 and of 2 and 3, with their environments."""
    store = LocalStore(tmp_path / "cache", SilentReporter())

    def put(kind: str, number: int, record: object) -> None:
        store.get_or_build(kind, key(number), lambda folder: (folder / RECORD_FILE).write_bytes(dump(record)) and None)  # type: ignore[arg-type, func-returns-value]
        os.utime(store.path_of(kind, key(number)), (0, 0))

    for number in (1, 2, 3):
        put("layers", number, EnvironmentLayerRecord(key=key(number), layer=layer(number), packages={}))
    for number, layers in ((1, (1, 2)), (2, (2, 3))):
        record = RECORD.model_copy(
            update={
                "oci_digest": key(10 + number),
                "lock_digest": key(20 + number),
                "layers": tuple(layer(member) for member in layers),
            }
        )
        put("images", number, record)
        put("environments", number, EnvironmentRecord(layers=tuple(key(member) for member in layers), packages={}))
    return store


def going(store: LocalStore, kept: Needs) -> set[tuple[str, int]]:
    return {(entry.kind, int(entry.key, 16)) for entry in unneeded_entries(store, kept)}


def test_what_a_kept_image_is_made_of_stays(store: LocalStore) -> None:
    by_image = Needs(images=frozenset({key(11)}))
    assert going(store, by_image) == {("images", 2), ("environments", 2), ("layers", 3)}
    by_lock = Needs(locks=frozenset({key(22)}))
    assert going(store, by_lock) == {("images", 1), ("environments", 1), ("layers", 1)}
    assert len(going(store, Needs())) == 7


def test_what_was_used_lately_stays(store: LocalStore) -> None:
    os.utime(store.path_of("images", key(1)))
    assert ("images", 1) not in going(store, Needs())


def test_a_damaged_entry_goes(store: LocalStore) -> None:
    path = store.path_of("images", key(1))
    (path / RECORD_FILE).write_text("{")
    os.utime(path, (0, 0))
    assert ("images", 1) in going(store, Needs(locks=frozenset({key(21)})))


def test_locks_tags_and_the_last_nights_are_what_stays(tmp_path: Path) -> None:
    lock = make_lock(tmp_path / "lockfiles/mcore/debian12")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for number in (1, 2, 3):
            at = f"2026-01-0{number}T00:00:00Z"
            ledger.record(
                night_row(f"n{number}", started_at=at),
                step_row("image", night=f"n{number}", started_at=at, lock_digest=key(number)),
                image_row(number, oci_digest=key(10 + number), lock_digest=key(number)),
                publication_row(number, published_at=at, moving_tag="other" if number == 1 else "mcore-cpu"),
            )
        kept = what_stays(ledger, tmp_path, tmp_path / "out", 2)
        assert kept.locks == {lock.digest, key(2), key(3)}
        heads = {publication_row(number).oci_digest for number in (1, 3)}
        assert kept.images == {key(12), key(13), *heads}
