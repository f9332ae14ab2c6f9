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
