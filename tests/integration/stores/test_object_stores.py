"""Objects by their paths in buckets and directories: conditional writes, transfers that go on, and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.store_entries import Place, check_error

from envbuild.core.errors import NetworkError
from envbuild.core.files import NotPlainFileError
from envbuild.store import bucket
from envbuild.store.address import parse_address
from envbuild.store.backend import ObjectStore
from envbuild.store.connect import open_object_store
from envbuild.store.registry_errors import Wording

pytestmark = pytest.mark.usefixtures("own_account")
MANY = 1 << 20


def open_place(place: Place) -> ObjectStore:
    return open_object_store(parse_address(place.url), endpoint=place.endpoint, wording=Wording(noun=".sqsh store"))


def test_conditional_writes(with_objects: Place) -> None:
    store = open_place(with_objects)
    assert store.read("tags/a.json", MANY) is None
    assert store.create("tags/a.json", b"one")
    assert not store.create("tags/a.json", b"two")
    first = store.read("tags/a.json", MANY)
    assert first is not None
    assert first.content == b"one"
    assert store.replace("tags/a.json", b"two", first)
    assert not store.replace("tags/a.json", b"three", first)
    second = store.read("tags/a.json", MANY)
    assert second is not None
    assert second.content == b"two"
    assert store.names("tags") == ["tags/a.json"]
    with pytest.raises(NotPlainFileError):
        store.read("tags/a.json", 2)


def test_a_replacement_of_what_is_gone_is_none(with_objects: Place) -> None:
    store = open_place(with_objects)
    store.create("tags/a.json", b"one")
    first = store.read("tags/a.json", MANY)
    assert first is not None
    store.write("tags/a.json", b"other")
    assert not store.replace("tags/a.json", b"two", first)
    store.remove("tags/a.json")
    assert not store.replace("tags/a.json", b"two", first)
    assert store.read("tags/a.json", MANY) is None


def test_the_stores_own_time_is_that_of_its_objects(with_objects: Place) -> None:
    store = open_place(with_objects)
    before = store.now()
    store.write("tags/a.json", b"one")
    read = store.read("tags/a.json", MANY)
    assert read is not None
    assert before <= read.modified <= store.now()


def test_a_file_in_parts_and_its_end(with_objects: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "LEAST_PART_BYTES", 5 << 20)
    store = open_place(with_objects)
    content = os.urandom((11 << 20) + 5)
    (tmp_path / "file").write_bytes(content)
    store.upload(tmp_path / "file", "sqsh/x.sqsh", len(content))
    assert store.size("sqsh/x.sqsh") == len(content)
    # A part is compared by the server with the checksum that it came with.
    puts = [headers for method, _, headers in with_objects.proxy.requests if method == "PUT"]
    if with_objects.url.startswith("s3"):
        assert len(puts) == 3
        assert all("x-amz-checksum-sha256" in {name.lower() for name in headers} for headers in puts)
    (tmp_path / "to").write_bytes(content[:-1000])
    assert store.download("sqsh/x.sqsh", len(content), tmp_path / "to", len(content) - 1000)
    assert (tmp_path / "to").read_bytes() == content
    assert not store.download("sqsh/y.sqsh", 1, tmp_path / "none")


def test_a_part_that_was_cut_is_sent_again(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "LEAST_PART_BYTES", 5 << 20)
    store = open_place(s3)
    content = os.urandom(11 << 20)
    (tmp_path / "file").write_bytes(content)
    s3.proxy.add(method="PUT", path="partNumber=2", times=1, cut_request=100_000)
    store.upload(tmp_path / "file", "sqsh/x.sqsh", len(content))
    # That part alone.
    assert s3.proxy.count("PUT", "partNumber=1") == 1
    assert s3.proxy.count("PUT", "partNumber=2") == 2
    assert store.download("sqsh/x.sqsh", len(content), tmp_path / "to")
    assert (tmp_path / "to").read_bytes() == content


FORGOTTEN = b"<Error><Code>NoSuchUpload</Code></Error>"


@pytest.fixture
def in_parts(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A file of three parts, and its content; its upload is waited for in no time."""
    monkeypatch.setattr(bucket, "LEAST_PART_BYTES", 5 << 20)
    monkeypatch.setattr(bucket, "ARRIVAL_PAUSE_SECONDS", 0.0)
    content = os.urandom(11 << 20)
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file", content


def content_of(store: ObjectStore, path: str, to: Path) -> bytes:
    assert store.download(path, 11 << 20, to)
    return to.read_bytes()


def test_an_upload_that_its_store_puts_together_slowly_is_waited_for(
    s3: Place, in_parts: tuple[Path, bytes], tmp_path: Path
) -> None:
    """S3 is at it, the request is sent again, and its upload is not known any more by then."""
    store, (file, content) = open_place(s3), in_parts
    s3.proxy.add(method="POST", path="uploadId", times=1, drop_answer=True)
    s3.proxy.add(method="POST", path="uploadId", status=404, body=FORGOTTEN)
    # That before the upload, and two after it.
    s3.proxy.add(method="HEAD", path="x.sqsh", times=3, status=404)
    store.upload(file, "sqsh/x.sqsh", len(content))
    assert s3.proxy.count("HEAD", "x.sqsh") == 4
    assert s3.proxy.count("PUT", "partNumber") == 3
    assert content_of(store, "sqsh/x.sqsh", tmp_path / "to") == content


@pytest.mark.parametrize(("method", "path"), [("POST", "uploadId"), ("PUT", "partNumber=2")])
def test_an_upload_that_its_store_forgot_is_sent_once_more(
    s3: Place, in_parts: tuple[Path, bytes], tmp_path: Path, method: str, path: str
) -> None:
    """What was there before, of the same size, is not taken for it."""
    store, (file, content) = open_place(s3), in_parts
    store.write("sqsh/x.sqsh", bytes(len(content)))
    s3.proxy.add(method=method, path=path, times=1, status=404, body=FORGOTTEN)
    store.upload(file, "sqsh/x.sqsh", len(content))
    assert content_of(store, "sqsh/x.sqsh", tmp_path / "to") == content
    s3.proxy.add(method=method, path=path, status=404, body=FORGOTTEN)
    with pytest.raises(NetworkError) as refused:
        store.upload(file, "sqsh/x.sqsh", len(content))
    check_error(refused.value, "404", "NoSuchUpload", "forgot the upload")
    assert "no bucket" not in f"{refused.value.what} {refused.value.why}"


@pytest.mark.parametrize(
    ("status", "code", "help_text"),
    [
        (403, "QuotaExceeded", "quota is used up"),
        (403, "RequestTimeTooSkewed", "Set this machine's clock"),
        (403, "AccessDenied", "Give the account of AWS_ACCESS_KEY_ID the right"),
        (400, "ExpiredToken", "The credentials expired"),
        (507, "", "space is used up"),
    ],
)
def test_what_a_refusal_means(s3: Place, tmp_path: Path, status: int, code: str, help_text: str) -> None:
    store = open_place(s3)
    (tmp_path / "file").write_bytes(b"content")
    s3.proxy.add(method="PUT", status=status, body=f"<Error><Code>{code}</Code></Error>".encode() if code else b"")
    with pytest.raises(NetworkError) as refused:
        store.upload(tmp_path / "file", "sqsh/x.sqsh", 7)
    check_error(refused.value, f".sqsh store {s3.url} refuses", str(status), code, help_text)
    assert "ENVBUILD_STORE" not in refused.value.fix


def test_a_bucket_that_is_missing_is_named(s3: Place, tmp_path: Path) -> None:
    store = open_place(Place(s3.url.replace("wheels/", "none/"), s3.endpoint, s3.proxy))
    (tmp_path / "file").write_bytes(b"content")
    for use in (
        lambda: store.upload(tmp_path / "file", "x", 7),
        lambda: store.read("x", MANY),
        lambda: store.size("x"),
        lambda: store.names("x"),
        store.now,
    ):
        with pytest.raises(NetworkError) as refused:
            use()
        check_error(refused.value, "There is no bucket none")
