"""A .sqsh store in buckets and directories: two publishers at once, and requests that are dropped."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.sqsh_stores import BUNDLE, make_image
from helpers.store_entries import Place

from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.publish.sqsh_stores import WORDING, SqshStore
from envbuild.store.address import parse_address
from envbuild.store.connect import open_object_store

pytestmark = pytest.mark.usefixtures("own_account")
NOW = moment_of("2026-11-20T06:00:00Z")


def open_place(place: Place) -> SqshStore:
    objects = open_object_store(parse_address(place.url), endpoint=place.endpoint, wording=WORDING)
    return SqshStore(address=place.url, objects=objects)


def test_publishers_at_once_lose_nothing(with_objects: Place, tmp_path: Path) -> None:
    images = [
        make_image(open_place(with_objects), tmp_path, name, published_at=later.strftime(MOMENT_FORMAT))
        for name, later in ((f"n{number}", NOW + timedelta(minutes=number)) for number in range(4))
    ]
    begin = threading.Barrier(len(images))

    def publish(number: int) -> None:
        store = open_place(with_objects)
        begin.wait()
        images[number].put(store)
        store.move_tag("mcore-cpu", images[number].publication, NOW + timedelta(days=1))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_place(with_objects)
    assert {item.tag for item in store.publications()} == {image.publication.tag for image in images}
    # Whoever came last, the newest one has the tag.
    assert store.find("mcore-cpu") == images[-1].publication
    for image in images:
        assert store.find(image.publication.oci_digest) == image.publication
        assert store.bundle(image.publication) == BUNDLE


@pytest.mark.slow
def test_a_store_that_drops_requests(s3: Place, tmp_path: Path) -> None:
    store = open_place(s3)
    image = make_image(store, tmp_path)
    for method in ("GET", "PUT", "HEAD"):
        s3.proxy.add(method=method, times=2, cut_request=0)
    image.put(store)
    assert store.find(image.publication.tag) == image.publication
    assert store.download(image.publication.sqsh, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == image.file.read_bytes()


def test_an_answer_that_was_lost_is_no_conflict(s3: Place, tmp_path: Path) -> None:
    store = open_place(s3)
    image = make_image(store, tmp_path)
    # The bucket has it, and the connection ends before it says so; the second try meets the first one's object.
    s3.proxy.add(method="PUT", path="publications/", times=1, cut_after=0)
    image.put(store)
    assert store.publications() == (image.publication,)
