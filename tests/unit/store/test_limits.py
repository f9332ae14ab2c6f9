"""A registry that never ends its answer is given up: pages, bytes, seconds, redirects and uploads are bounded."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.registry_servers import Reply, answering

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.oci.referrers import INDEX_TYPE, list_referrers
from envbuild.store import bucket, registry, tags, transfer
from envbuild.store.address import parse_address
from envbuild.store.connect import open_object_store
from envbuild.store.registry import Registry
from envbuild.store.registry_errors import Wording
from envbuild.store.tags import list_tags
from envbuild.store.upload import upload_blob

LISTING = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><Prefix>images/tags/</Prefix>
<KeyCount>1</KeyCount><MaxKeys>1</MaxKeys><IsTruncated>true</IsTruncated>
<NextContinuationToken>{number}</NextContinuationToken>
<Contents><Key>images/tags/{number}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><Size>1</Size>
<ETag>&quot;a&quot;</ETag></Contents></ListBucketResult>"""
DIGEST = sha256_bytes(b"an image")


@contextlib.contextmanager
def asking(answer: Callable[..., Reply]) -> Iterator[tuple[Registry, list[Any]]]:
    """A repository on a server whose bodies may have no end; and what it was asked for."""
    with answering() as server:
        server.answer = answer
        address = parse_address(f"oci://{server.host}/team/images")
        yield Registry(address, None, {"HOME": "/nowhere", "NO_PROXY": "127.0.0.1"}), server.requests


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    """What is a minute otherwise is an instant; without proxies and waits."""
    for name, value in {"HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(registry, "BACKOFF_SECONDS", 0)
    monkeypatch.setattr(tags, "MOST_ANSWERS", 20)


def pages(document: Callable[[int], object], kind: str = "application/json") -> Callable[..., Reply]:
    """Pages each of which links to a further one."""
    numbers = itertools.count()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        number = next(numbers)
        link = f'<{path.partition("?")[0]}?last={number}>; rel="next"'
        return 200, {"Content-Type": kind, "Link": link}, iter([json.dumps(document(number)).encode()])

    return answer


def without_end(piece: bytes = b"x" * 4096) -> Callable[..., Reply]:
    """A body that comes fast enough, and never ends."""
    return lambda *_: (200, {}, itertools.repeat(piece))


def test_endless_pages_of_tags():
    with (
        asking(pages(lambda number: {"tags": [f"t{number}"]})) as (there, asked),
        pytest.raises(NetworkError, match="does not end its list of tags") as refused,
    ):
        list_tags(there)
    assert len(asked) == tags.MOST_ANSWERS
    assert refused.value.why
    assert "envbuild gc" in refused.value.fix


def test_endless_pages_of_artifacts():
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
    with (
        asking(pages(lambda _: index, INDEX_TYPE)) as (there, asked),
        pytest.raises(NetworkError, match="does not end its list of artifacts"),
    ):
        list_referrers(there, DIGEST)
    assert len(asked) == tags.MOST_ANSWERS


def test_pages_of_too_many_bytes(monkeypatch):
    monkeypatch.setattr(tags, "MOST_ANSWER_BYTES", 1000)
    with (
        asking(pages(lambda number: {"tags": [f"{number}" * 120]})) as (there, asked),
        pytest.raises(NetworkError, match="does not end"),
    ):
        list_tags(there)
    assert len(asked) < tags.MOST_ANSWERS


def test_pages_that_end_are_read():
    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        last = "last=" in path
        more = {} if last else {"Link": f'<{path.partition("?")[0]}?last=a>; rel="next"'}
        return 200, more, iter([json.dumps({"tags": ["b" if last else "a"]}).encode()])

    with asking(answer) as (there, _):
        assert list_tags(there) == ["a", "b"]


def test_an_answer_without_end(monkeypatch):
    monkeypatch.setattr(transfer, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "MOST_ANSWER_BYTES", 1 << 40)
    monkeypatch.setattr(registry, "HEAD_SECONDS", 0.5)
    with asking(without_end(b"x")) as (there, _), pytest.raises(NetworkError, match="cannot be reached") as slow:
        there.ask("GET", "manifests/tag", accept=(200,))
    assert "and not whole" in slow.value.why


def test_a_token_without_end(monkeypatch):
    monkeypatch.setattr(transfer, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "MOST_ANSWER_BYTES", 1 << 40)

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path.startswith("/token"):
            return 200, {}, itertools.repeat(b"x")
        realm = f"http://127.0.0.1:{port}/token"
        return 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, iter([])

    with asking(answer) as (there, _):
        port = there.address.host.partition(":")[2]
        monkeypatch.setattr(registry, "HEAD_SECONDS", 0.5)
        with pytest.raises(NetworkError, match="cannot be reached"):
            there.ask("GET", "manifests/tag", accept=(200,))


def test_a_file_that_comes_too_slowly_on_the_whole(monkeypatch, tmp_path):
    """Faster than the least, and of a size that nobody waits for."""
    monkeypatch.setattr(transfer, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "LEAST_OF_A_FILE", 1 << 60)
    with asking(without_end(b"x")) as (there, _), pytest.raises(NetworkError, match="is too slow") as slow:
        there.download("blobs/x", 1 << 50, tmp_path / "file")
    assert "goes on where it ended" in slow.value.fix
    assert (tmp_path / "file").stat().st_size


def test_redirects_without_end():
    numbers = itertools.count()
    with (
        asking(lambda *_: (307, {"Location": f"/v2/team/images/{next(numbers)}"}, iter([]))) as (there, asked),
        pytest.raises(NetworkError, match="cannot be reached"),
    ):
        there.ask("GET", "manifests/tag", accept=(200,))
    assert len(asked) <= 10


@pytest.mark.parametrize("ranges", [["0-9"], ["0-9", "0-99", "0-49"]], ids=["it stays", "it goes to and fro"])
def test_an_upload_that_never_goes_on(monkeypatch, tmp_path, ranges):
    monkeypatch.setattr("envbuild.store.upload.CHUNK_BYTES", 1000)
    said = itertools.cycle(ranges)

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        where = {"Location": "/v2/team/images/blobs/uploads/1"}
        if method == "PATCH":
            return 202, {**where, "Range": next(said)}, iter([])
        return (404 if method in ("HEAD", "PUT") else 202), where, iter([])

    file = tmp_path / "file"
    file.write_bytes(b"x" * 5000)
    with asking(answer) as (there, asked), pytest.raises(NetworkError, match="cannot be reached"):
        upload_blob(there, file, DIGEST, 5000)
    assert len(asked) < 200


@pytest.mark.parametrize("doing", ["read", "size", "download"])
def test_an_object_of_a_bucket_that_trickles(monkeypatch, tmp_path, doing):
    # Of a download the answer comes at once, and its body has a limit of its own.
    monkeypatch.setattr(bucket, "ANSWER_SECONDS", 60 if doing == "download" else 0.3)
    monkeypatch.setattr(bucket, "longest_seconds", lambda _: 0.3)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "word")
    over = threading.Event()

    def trickle() -> Iterator[bytes]:
        while not over.wait(0.05):
            yield b"x"

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if method == "HEAD":
            over.wait()
        about = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"a"', "Content-Length": "100000"}
        return 200, about, trickle()

    with answering() as server:
        server.answer = answer
        address, endpoint = parse_address("s3://bucket/images"), f"http://{server.host}"
        store = open_object_store(address, endpoint=endpoint, ca_bundle=None, wording=Wording(noun="store"))
        calls = {
            "read": lambda: store.read("tags/a.json", 1 << 20),
            "size": lambda: store.size("tags/a.json"),
            "download": lambda: store.download("sqsh", 100_000, tmp_path / "file"),
        }
        # What never ends is ended here, for the test to fail.
        ending = threading.Timer(10, over.set)
        ending.start()
        try:
            with pytest.raises(NetworkError, match="is too slow to"):
                calls[doing]()
        finally:
            over.set()
            ending.cancel()


@pytest.mark.parametrize("limit", [{"MOST_NAMES": 20}, {"LIST_SECONDS": 0.2}])
def test_an_endless_list_of_a_bucket(monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(bucket, name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "word")
    numbers = itertools.count()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        number = next(numbers)
        page = LISTING.format(number=number)
        # Without names obstore asks on by itself.
        page = page if "MOST_NAMES" in limit else re.sub("<Contents>.*</Contents>", "", page, flags=re.DOTALL)
        return 200, {"Content-Type": "application/xml"}, iter([page.encode()])

    with asking(answer) as (there, asked):
        address, endpoint = parse_address("s3://bucket/images"), f"http://{there.address.host}"
        store = open_object_store(address, endpoint=endpoint, ca_bundle=None, wording=Wording(noun="store"))
        with pytest.raises(NetworkError, match="does not end its list of objects"):
            store.names("tags")
    assert asked
