"""What goes from a .sqsh store, in buckets and directories, and what stays."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from helpers.sqsh_stores import BUNDLE, Image, make_image
from helpers.store_entries import Place
from integration.stores.test_sqsh_stores import open_place

from envbuild.catalog.fields import moment_of
from envbuild.core.digests import sha256_bytes
from envbuild.publish import collect_sqsh
from envbuild.publish.collect import Needs
from envbuild.publish.collect_sqsh import plan_store_sweep, sweep_store
from envbuild.publish.models import Revocation
from envbuild.publish.sqsh_stores import SqshStore

pytestmark = pytest.mark.usefixtures("own_account")
AT = moment_of("2026-11-20T06:00:00Z")
LATER = AT + timedelta(days=2)


def put(store: SqshStore, folder: Path, name: str, **changes: object) -> Image:
    image = make_image(store, folder, name, lock_digest=sha256_bytes(f"lock {name}".encode()), **changes)
    image.put(store)
    return image


def test_what_nothing_needs_goes_with_its_files(with_objects: Place, tmp_path: Path) -> None:
    store = open_place(with_objects)
    old, locked, late, head, back = (put(store, tmp_path, name) for name in ("old", "locked", "late", "head", "back"))
    store.move_tag("mcore-cpu", head.publication, AT)
    store.revoke(back.publication.oci_digest, Revocation(reason="wrong numbers", at="2026-11-20T07:00:00Z"))
    needs = Needs(locks=frozenset({locked.publication.lock_digest}), images=frozenset({late.publication.oci_digest}))
    planned = plan_store_sweep(store, needs, LATER)
    assert planned.going == (old.publication,)
    assert planned.kept == {
        locked.publication.tag: "a lock needs it",
        late.publication.tag: "a late night needs it",
        head.publication.tag: "the tag mcore-cpu names it",
        back.publication.tag: "it was revoked",
    }
    assert planned.damaged == ()
    assert sweep_store(store, planned.going) == planned.going
    for name in (old.publication.tag, old.publication.oci_digest, old.publication.sqsh.digest):
        assert store.find(name) is None
    assert not [path for path in _objects(store) if old.publication.sqsh.digest[7:] in path]
    for image in (locked, late, head):
        assert store.find(image.publication.tag) == image.publication
        # All have one certificate here: it stays while one of them does.
        assert store.bundle(image.publication) == BUNDLE
        assert store.download(image.publication.sqsh, tmp_path / image.publication.tag)
    assert sweep_store(store, planned.going) == ()


def test_a_file_of_two_publications_stays_with_the_other(with_objects: Place, tmp_path: Path) -> None:
    store = open_place(with_objects)
    old = put(store, tmp_path, "old")
    other = old.publication.model_copy(update={"tag": "mcore-other-cpu", "oci_digest": sha256_bytes(b"other")})
    store.put(old.file, other, BUNDLE)
    sweep_store(store, [old.publication])
    assert store.find(other.sqsh.digest) == other
    assert store.download(other.sqsh, tmp_path / "got")
    sweep_store(store, [other])
    assert _objects(store) == []


def test_what_was_published_within_a_day_stays(with_objects: Place, tmp_path: Path) -> None:
    store = open_place(with_objects)
    image = put(store, tmp_path, "new")
    planned = plan_store_sweep(store, Needs(), AT + timedelta(hours=23))
    assert (planned.going, planned.kept) == ((), {image.publication.tag: "it was published within a day"})


def test_one_that_was_published_again_stays(with_objects: Place, tmp_path: Path) -> None:
    store = open_place(with_objects)
    image = put(store, tmp_path, "again")
    planned = plan_store_sweep(store, Needs(), LATER)
    again = image.publication.model_copy(update={"published_at": "2026-11-22T05:59:00Z"})
    store.put(image.file, again, BUNDLE)
    assert sweep_store(store, planned.going) == ()
    assert store.find(again.tag) == again


def test_the_next_call_ends_what_a_killed_one_began(
    with_objects: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_place(with_objects)
    image = put(store, tmp_path, "killed")
    for count in range(4):
        planned = plan_store_sweep(store, Needs(), LATER)
        assert planned.going == (image.publication,)
        paths = collect_sqsh._paths(image.publication, ())
        for path in paths[:count]:
            store.objects.remove(path)
    planned = plan_store_sweep(store, Needs(), LATER)
    assert sweep_store(store, planned.going) == planned.going
    assert _objects(store) == []


def test_a_lost_certificate_is_named(with_objects: Place, tmp_path: Path) -> None:
    store = open_place(with_objects)
    image = put(store, tmp_path, "lost")
    store.objects.remove(f"certificates/sha256/{image.publication.certificate_digest[7:]}.json")
    assert plan_store_sweep(store, Needs(), AT).damaged == (image.publication,)


def _objects(store: SqshStore) -> list[str]:
    """All that is there, but for the area that a directory has for what comes in."""
    return [path for path in store.objects.names("") if not path.startswith("incoming/")]
