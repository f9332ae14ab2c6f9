"""A .sqsh store in a directory: what is put there is whole, and two publishers lose nothing of each other's."""

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from helpers.sqsh_stores import BUNDLE, make_image

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.catalog.site import load_site
from envbuild.core.errors import CheckRefusedError, ConfigurationError, NetworkError, PublicationRefusedError
from envbuild.publish import sqsh_stores
from envbuild.publish.models import Revocation
from envbuild.publish.sqsh_stores import SqshStore, open_sqsh_store, store_of
from envbuild.store import conditional

NOW = datetime(2026, 11, 20, 6, 0, 0, tzinfo=timezone.utc)
BACK = Revocation(reason="wrong numbers", at="2026-11-20T07:00:00Z")


def moment(**later: float) -> str:
    return (NOW + timedelta(**later)).strftime(MOMENT_FORMAT)


@pytest.fixture
def site(tmp_path):
    return load_site({"HOME": str(tmp_path)})


@pytest.fixture
def store(tmp_path, site) -> SqshStore:
    (tmp_path / "share").mkdir()
    return open_sqsh_store(str(tmp_path / "share"), site)


def test_put_and_find_by_tag_and_digest(store, tmp_path):
    image = make_image(store, tmp_path)
    place = image.put(store)
    assert place == f"file://{tmp_path}/share/sqsh/sha256/{image.publication.sqsh.digest[7:]}.sqsh"
    for name in (image.publication.tag, image.publication.oci_digest, image.publication.sqsh.digest):
        assert store.find(name) == image.publication
    assert store.find("mcore-cpu") is None
    assert store.find("sha256:" + "0" * 64) is None
    assert store.find("../../etc/passwd") is None
    assert store.publications() == (image.publication,)
    assert store.bundle(image.publication) == BUNDLE
    assert store.download(image.publication.sqsh, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == image.file.read_bytes()
    assert (tmp_path / "share/sqsh/sha256" / f"{image.publication.sqsh.digest[7:]}.sqsh").is_file()


def test_put_again_sends_nothing(store, tmp_path):
    image = make_image(store, tmp_path)
    image.put(store)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "share").rglob("*.*")}
    image.put(store)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "share").rglob("*.*")} == before


def test_truncated_file_is_put_again(store, tmp_path):
    image = make_image(store, tmp_path)
    there = Path(image.put(store).removeprefix("file://"))
    there.write_bytes(image.file.read_bytes()[:100])
    image.put(store)
    assert there.read_bytes() == image.file.read_bytes()


def test_file_that_was_changed_is_not_put(store, tmp_path):
    image = make_image(store, tmp_path)
    image.file.write_bytes(image.file.read_bytes().replace(b"a", b"b"))
    with pytest.raises(CheckRefusedError, match="is not put into"):
        image.put(store)
    assert store.publications() == ()
    assert store.find(image.publication.tag) is None


def test_what_a_killed_publisher_left_is_no_publication(store, tmp_path, monkeypatch):
    image = make_image(store, tmp_path)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(SqshStore, "_change", killed)
    with pytest.raises(KeyboardInterrupt):
        image.put(store)
    monkeypatch.undo()
    assert store.find(image.publication.tag) is None
    image.put(store)
    assert store.find(image.publication.tag) == image.publication


def test_immutable_tag_stays_with_its_image(store, tmp_path):
    first = make_image(store, tmp_path, "a")
    first.put(store)
    other = make_image(store, tmp_path, "b", tag=first.publication.tag)
    with pytest.raises(PublicationRefusedError, match="is another image") as refused:
        other.put(store)
    assert first.publication.oci_digest in refused.value.fix
    store.revoke(first.publication.oci_digest, BACK)
    other.put(store)
    assert store.find(first.publication.tag) == other.publication
    assert len(store.publications()) == 2


def test_moving_tag_goes_on_and_not_back(store, tmp_path):
    old = make_image(store, tmp_path, "a", published_at=moment())
    new = make_image(store, tmp_path, "b", published_at=moment(hours=1))
    for image in (old, new):
        image.put(store)
    at = NOW + timedelta(hours=2)
    assert store.move_tag("mcore-cpu", new.publication, at)
    assert not store.move_tag("mcore-cpu", old.publication, at)
    assert store.find("mcore-cpu") == new.publication
    store.revoke(new.publication.oci_digest, BACK)
    assert store.find("mcore-cpu").revoked == BACK
    assert store.move_tag("mcore-cpu", old.publication, at)
    assert store.find("mcore-cpu") == old.publication


def test_a_clock_that_is_ahead_holds_no_tag(store, tmp_path):
    ahead = make_image(store, tmp_path, "a", published_at=moment(days=30))
    now = make_image(store, tmp_path, "b", published_at=moment())
    for image in (ahead, now):
        image.put(store)
        assert store.move_tag("mcore-cpu", image.publication, NOW)
    assert store.find("mcore-cpu") == now.publication


def test_a_tag_that_another_moves_meanwhile(store, tmp_path, monkeypatch):
    images = [make_image(store, tmp_path, name, published_at=moment(hours=i)) for i, name in enumerate("abc")]
    for image in images:
        image.put(store)
    at = NOW + timedelta(days=1)
    store.move_tag("mcore-cpu", images[0].publication, at)
    replace = type(store.objects).replace
    raced = []

    def race(self, path, content, of):
        if not raced:  # another publisher comes between reading and writing
            raced.append(path)
            assert store.move_tag("mcore-cpu", images[2].publication, at)
        return replace(self, path, content, of)

    monkeypatch.setattr(type(store.objects), "replace", race)
    assert not store.move_tag("mcore-cpu", images[1].publication, at)
    assert raced == ["tags/mcore-cpu.json"]
    assert store.find("mcore-cpu") == images[2].publication


def test_a_store_without_conditional_writes_is_told(store, tmp_path, monkeypatch):
    image = make_image(store, tmp_path)
    monkeypatch.setattr(type(store.objects), "create", lambda *_: False)
    with pytest.raises(NetworkError, match="cannot be written") as refused:
        image.put(store)
    assert f"{conditional.ATTEMPTS} times" in refused.value.why


def test_revocation_stays_with_a_new_certificate(store, tmp_path):
    image = make_image(store, tmp_path)
    image.put(store)
    assert store.revoke(image.publication.oci_digest, BACK).revoked == BACK
    assert store.revoke(image.publication.oci_digest, BACK.model_copy(update={"reason": "other"})).revoked == BACK
    make_image(store, tmp_path, published_at=moment(days=1)).put(store)
    assert store.find(image.publication.tag).revoked == BACK
    assert store.revoke("sha256:" + "0" * 64, BACK) is None


def test_revocation_where_its_document_was_changed(store, tmp_path):
    image = make_image(store, tmp_path)
    image.put(store)
    (file,) = (tmp_path / "share" / "publications").rglob("*.json")
    content = file.read_bytes()
    file.write_bytes(b"{")
    with pytest.raises(CheckRefusedError):
        store.revoke(image.publication.oci_digest, BACK)
    file.write_bytes(content)
    assert store.revocation(store.find(image.publication.tag)) == BACK


def test_publications_without_end(store, tmp_path, monkeypatch):
    make_image(store, tmp_path).put(store)
    monkeypatch.setattr(sqsh_stores, "MOST_SECONDS", -1, raising=False)
    with pytest.raises(NetworkError, match="too many publications") as refused:
        store.publications()
    assert refused.value.fix


def test_newer_certificate_of_an_image_takes_the_older_ones_place(store, tmp_path):
    make_image(store, tmp_path).put(store)
    newer = make_image(store, tmp_path, published_at=moment(days=1), measured_at=moment(hours=20))
    newer.put(store)
    make_image(store, tmp_path).put(store)
    assert store.publications() == (newer.publication,)


@pytest.mark.parametrize(
    ("path", "change", "why"),
    [
        ("tags/mcore-a-cpu.json", lambda _: b"{", "pointer cannot be read"),
        ("tags/mcore-a-cpu.json", lambda data: data.replace(b"publications/", b"../other/"), "pointer cannot be read"),
        ("tags/mcore-a-cpu.json", lambda data: data.replace(b"mcore-a-cpu", b"mcore-b-cpu"), "not there"),
        ("publications", lambda data: data[:50], "cannot be read|not JSON"),
        ("publications", lambda data: data.replace(b'"tag":"mcore-a-cpu"', b'"tag":"mcore-x-cpu"'), "publication of"),
        ("publications", lambda data: data[:-1] + b',"more":1}', "more is unknown"),
    ],
)
def test_a_document_that_was_changed_is_refused(store, tmp_path, path, change, why):
    image = make_image(store, tmp_path)
    image.put(store)
    file = tmp_path / "share" / path
    file = file if file.is_file() else next(file.rglob("*.json"))
    changed = change(file.read_bytes())
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    with pytest.raises(CheckRefusedError, match=r"share is refused") as refused:
        store.find("mcore-a-cpu")
    assert re.search(why, refused.value.why)
    assert refused.value.fix


def test_what_is_no_file_is_refused(store, tmp_path):
    image = make_image(store, tmp_path)
    there = Path(image.put(store).removeprefix("file://"))
    there.unlink()
    there.symlink_to("/dev/zero")
    with pytest.raises(CheckRefusedError, match=r"\.sqsh of the \.sqsh store"):
        store.download(image.publication.sqsh, tmp_path / "got")


def test_place_leads_to_its_store(store, site, tmp_path):
    image = make_image(store, tmp_path)
    opened = store_of(image.put(store), site)
    assert opened.address == store.address
    for wrong in ("", "s3://bucket/other", "file:///etc/passwd", "/etc/passwd"):
        with pytest.raises(ConfigurationError):
            store_of(wrong, site)


def test_addresses(site, tmp_path):
    with pytest.raises(ConfigurationError, match=r"not the address of a \.sqsh store"):
        open_sqsh_store("oci://host/repo", site)
    assert open_sqsh_store(f"{tmp_path}/with space", site).address == f"file://{tmp_path}/with space"
