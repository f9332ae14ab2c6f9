"""Remote stores against real servers: docker's registry, an S3 service, and a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.fault_proxy import FaultProxy, fault_proxy
from helpers.processes import wait_until
from helpers.stores import (
    BUCKET,
    PASSWORD,
    S3_KEYS,
    USER,
    docker_registry,
    registry_program,
    s3_server,
    write_docker_config,
    write_helper,
)

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, EnvbuildError, MachineError, NetworkError
from envbuild.store import objects, registry
from envbuild.store.document import Document
from envbuild.store.opening import open_remote
from envbuild.store.remote import Pushed, Remote

KEY, OTHER_KEY = sha256_bytes(b"one"), sha256_bytes(b"other")
SHELF = ("sdist", "fit")
BIG = os.urandom(3_000_000)
SECRETS = (S3_KEYS["AWS_SECRET_ACCESS_KEY"], "open-sesame-gs", PASSWORD, "YWxpOm9wZW4gc2VzYW1l")


@pytest.fixture(scope="session")
def registry_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return registry_program(shared_folder(tmp_path_factory) / "docker-registry")


@pytest.fixture(scope="module")
def registry_address(registry_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(registry_binary, tmp_path_factory.mktemp("registry") / "open") as address:
        yield address


@pytest.fixture(scope="module")
def closed_registry(registry_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry that wants a password."""
    with docker_registry(registry_binary, tmp_path_factory.mktemp("registry") / "closed", password=True) as address:
        yield address


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**S3_KEYS, "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    # The same number of tries, in less time.
    monkeypatch.setattr(registry, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(objects, "RETRIES", 3)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "open-sesame-gs")


@dataclass
class Place:
    """A store of one kind that is empty, and what is in front of its server."""

    url: str
    endpoint: str | None = None
    proxy: FaultProxy = field(default_factory=FaultProxy)

    def open(self, **changes: object) -> Remote:
        return open_remote(self.url, endpoint=self.endpoint, **changes)  # type: ignore[arg-type]


@pytest.fixture(params=["oci", "s3", "gs", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=["oci", "s3", "gs"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Only what speaks HTTP."""
    yield from _place(request.param, request, tmp_path)


@pytest.fixture
def oci(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place("oci", request, tmp_path)


@pytest.fixture
def s3(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place("s3", request, tmp_path)


def _place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    own = f"t{time.time_ns()}"
    if kind == "file":
        (tmp_path / "share").mkdir()
        yield Place(f"file://{tmp_path}/share")
        return
    server = request.getfixturevalue("registry_address" if kind == "oci" else "s3_address")
    with fault_proxy(server) as proxy:
        if kind == "oci":
            yield Place(f"oci://{proxy.host}/team/{own}", proxy=proxy)
        else:
            if kind == "gs":
                proxy.translate = as_s3
            yield Place(f"{kind}://{BUCKET}/{own}", proxy.address, proxy)


def as_s3(headers: dict[str, str]) -> dict[str, str]:
    """Google's XML API is S3's but for the condition of a put and the credentials."""
    told = {"x-goog-if-generation-match": ("If-None-Match", "*")}
    return dict(told.get(name.lower(), (name, value)) for name, value in headers.items())


def entry(folder: Path, text: str = "content", big: bytes = BIG) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "small.txt").write_text(text)
    (folder / "inner/big.bin").write_bytes(big)
    (folder / ".sealed.json").write_text("{}")
    return folder


def push(remote: Remote, folder: Path, key: str = KEY, **changes: object) -> Pushed:
    return remote.push("things", key, SHELF, folder, {"about": "it"}, **changes)  # type: ignore[arg-type]


def fetched(remote: Remote, folder: Path, key: str = KEY) -> Document:
    document = remote.find("things", key)
    assert document is not None
    folder.mkdir()
    remote.fetch(document, folder)
    return document


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_pushed_is_fetched(place: Place, tmp_path: Path) -> None:
    remote = place.open()
    assert remote.find("things", KEY) is None
    assert remote.keys("things") == []
    assert remote.shelved("things", ()) == []
    made = entry(tmp_path / "made")
    assert push(remote, made) is Pushed.NEW
    document = fetched(place.open(), tmp_path / "got")
    assert content(tmp_path / "got") == {"small.txt": b"content", "inner/big.bin": BIG}
    assert (document.key, document.record) == (KEY, {"about": "it"})
    assert push(remote, made) is Pushed.SAME
    assert push(remote, made, OTHER_KEY) is Pushed.NEW
    assert remote.keys("things") == sorted([KEY, OTHER_KEY])
    assert remote.keys("others") == []
    assert [offer.key for offer in remote.shelved("things", ("sdist",))] == sorted([KEY, OTHER_KEY])
    assert {offer.shelf for offer in remote.shelved("things", SHELF)} == {SHELF}
    assert remote.shelved("things", ("sdi",)) == []
    assert set(remote.documents("things", [KEY, OTHER_KEY, sha256_bytes(b"none")])) == {KEY, OTHER_KEY}


def test_the_first_writer_wins(place: Place, tmp_path: Path) -> None:
    first, second = entry(tmp_path / "first", "first"), entry(tmp_path / "second", "second")
    assert push(place.open(), first) is Pushed.NEW
    assert push(place.open(), second) is Pushed.OTHER
    fetched(place.open(), tmp_path / "got")
    assert (tmp_path / "got/small.txt").read_text() == "first"


WRITER = """
import sys, time
from pathlib import Path
from envbuild.store.opening import open_remote
url, endpoint, folder, key, start = sys.argv[1:]
remote = open_remote(url, endpoint=endpoint or None)
time.sleep(max(0.0, float(start) - time.time()))
print(remote.push("things", key, ("sdist", "fit"), Path(folder), {"about": "it"}).value)
"""


def test_of_many_writers_at_once_one_wins_and_the_others_know(place: Place, tmp_path: Path) -> None:
    """Processes of their own, as machines are."""
    running = {}
    start = str(time.time() + 3)
    for name in ("one", "two", "three", "four"):
        folder = entry(tmp_path / name, name, b"small")
        command = [sys.executable, "-c", WRITER, place.url, place.endpoint or "", str(folder), KEY, start]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    results = {name: process.communicate(timeout=60)[0].strip() for name, process in running.items()}
    fetched(place.open(), tmp_path / "got")
    winner = (tmp_path / "got/small.txt").read_text()
    assert sorted(results.values()) == [*[Pushed.OTHER.value] * 3, Pushed.NEW.value]
    assert results[winner] == Pushed.NEW.value
    assert place.open().keys("things") == [KEY]


def test_a_registry_where_two_come_within_the_moment_keeps_one(
    oci: Place, registry_address: str, tmp_path: Path
) -> None:
    """The put of one is held back until the other has put: that one notices that its entry is not the one."""
    behind = open_remote(oci.url.replace(oci.proxy.host, registry_address.removeprefix("http://")))
    held = threading.Event()

    def hold() -> None:
        held.set()
        wait_until(lambda: behind.find("things", KEY))

    oci.proxy.add(method="PUT", path="manifests/things-", times=1, hold=hold)
    results: dict[str, Pushed] = {}

    def late() -> None:
        results["late"] = push(oci.open(), entry(tmp_path / "late", "late"))

    thread = threading.Thread(target=late)
    thread.start()
    assert held.wait(10)
    results["early"] = push(oci.open(), entry(tmp_path / "early", "early"))
    thread.join()
    assert results == {"late": Pushed.NEW, "early": Pushed.OTHER}
    fetched(oci.open(), tmp_path / "got")
    assert (tmp_path / "got/small.txt").read_text() == "late"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param({"swap": os.urandom(len(BIG))}, "has another digest", id="swapped"),
        pytest.param({"keep": 1000}, "has 1000 bytes instead of 3000000", id="truncated"),
        pytest.param({"swap": BIG + b"more"}, "instead of 3000000", id="longer"),
        pytest.param({"status": 404}, "inner/big.bin is missing there", id="missing"),
    ],
)
def test_a_file_that_is_another_is_refused(served: Place, tmp_path: Path, spoil: dict[str, object], said: str) -> None:
    push(served.open(), entry(tmp_path / "made"))
    served.proxy.add(method="GET", path=sha256_bytes(BIG).removeprefix("sha256:"), **spoil)
    with pytest.raises(CheckRefusedError) as refused:
        fetched(served.open(), tmp_path / "got")
    assert said in refused.value.why
    assert "--replace" in refused.value.fix


def test_a_damaged_file_of_a_directory_is_refused_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    remote = open_remote(f"file://{tmp_path}/share")
    made = entry(tmp_path / "made")
    push(remote, made)
    blob = tmp_path / "share/blobs/sha256" / sha256_bytes(BIG).removeprefix("sha256:")
    blob.write_bytes(BIG[:-1] + b"?")
    with pytest.raises(CheckRefusedError, match="is refused"):
        fetched(remote, tmp_path / "got")
    assert push(remote, made) is Pushed.SAME
    assert push(remote, made, replace=lambda document: document is not None) is Pushed.REPLACED
    fetched(remote, tmp_path / "again")


def test_the_document_of_another_entry_is_refused(place: Place, tmp_path: Path) -> None:
    """Key A's entry, put under key B by hand."""
    remote = place.open()
    push(remote, entry(tmp_path / "made"))
    document = remote.backend.read("things", KEY)
    found = remote.find("things", KEY)
    assert document is not None
    assert found is not None
    assert remote.backend.create("things", OTHER_KEY, SHELF, document, found.blobs())
    with pytest.raises(CheckRefusedError) as refused:
        remote.find("things", OTHER_KEY)
    assert "kept under another name" in refused.value.why
    (problem,) = remote.documents("things", [OTHER_KEY]).values()
    assert isinstance(problem, CheckRefusedError)
    with pytest.raises(CheckRefusedError):
        push(remote, tmp_path / "made", OTHER_KEY)
    assert push(remote, tmp_path / "made", OTHER_KEY, replace=lambda found: found is None) is Pushed.REPLACED
    assert remote.find("things", OTHER_KEY) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": "envbuild.entry/2"}',
        json.dumps(
            {
                "schema": "envbuild.entry/1",
                "kind": "things",
                "key": KEY,
                "shelf": [],
                "record": {},
                "files": [{"name": "../../escaped", "digest": KEY, "size_bytes": 1}],
            }
        ).encode(),
    ],
    ids=["empty", "no JSON", "no object", "a later schema", "a file outside"],
)
def test_a_document_that_is_none_is_refused(place: Place, raw: bytes) -> None:
    remote = place.open()
    remote.backend.create("things", KEY, SHELF, raw, ())
    with pytest.raises(CheckRefusedError, match="is refused"):
        remote.find("things", KEY)


def test_a_cut_download_goes_on_where_it_was(served: Place, tmp_path: Path) -> None:
    push(served.open(), entry(tmp_path / "made"))
    blob = sha256_bytes(BIG).removeprefix("sha256:")
    served.proxy.add(method="GET", path=blob, times=2, cut_after=1_200_000)
    fetched(served.open(), tmp_path / "got")
    assert (tmp_path / "got/inner/big.bin").read_bytes() == BIG
    asked = [
        headers.get("Range", headers.get("range"))
        for method, path, headers in served.proxy.requests
        if blob in path and method == "GET"
    ]
    assert len(asked) == 3
    assert asked[1] is not None
    assert int(asked[1].removeprefix("bytes=").rstrip("-").partition("-")[0]) > 1_000_000


def test_a_download_that_is_always_cut_is_a_network_error(served: Place, tmp_path: Path) -> None:
    push(served.open(), entry(tmp_path / "made"))
    served.proxy.add(method="GET", path=sha256_bytes(BIG).removeprefix("sha256:"), cut_after=0)
    with pytest.raises(NetworkError) as refused:
        fetched(served.open(), tmp_path / "got")
    assert served.url in refused.value.what
    assert "ENVBUILD_STORE=off" in refused.value.fix


def test_a_cut_upload_is_started_again(served: Place, tmp_path: Path) -> None:
    served.proxy.add(method="PUT", path="blobs", times=2, cut_request=1000)
    assert push(served.open(), entry(tmp_path / "made")) is Pushed.NEW
    fetched(served.open(), tmp_path / "got")
    assert (tmp_path / "got/inner/big.bin").read_bytes() == BIG


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(served: Place, tmp_path: Path, status: int) -> None:
    for method in ("GET", "PUT", "POST", "HEAD"):
        served.proxy.add(method=method, times=1, status=status)
    assert push(served.open(), entry(tmp_path / "made")) is Pushed.NEW
    fetched(served.open(), tmp_path / "got")


def test_retry_after_is_honoured(oci: Place) -> None:
    oci.proxy.add(times=1, status=429, headers={"Retry-After": "2"})
    started = time.monotonic()
    assert oci.open().find("things", KEY) is None
    assert 1.9 < time.monotonic() - started < 4


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
@pytest.mark.parametrize("action", ["find", "push", "keys", "shelved"])
def test_a_server_that_refuses_is_a_network_error(served: Place, tmp_path: Path, status: int, action: str) -> None:
    body = b'{"errors": [{"code": "DENIED", "message": "not you"}]}'
    served.proxy.add(status=status, body=body)
    remote = served.open()
    actions: dict[str, Callable[[], object]] = {
        "find": lambda: remote.find("things", KEY),
        "push": lambda: push(remote, entry(tmp_path / "made")),
        "keys": lambda: remote.keys("things"),
        "shelved": lambda: remote.shelved("things", ()),
    }
    with pytest.raises(NetworkError) as refused:
        actions[action]()
    told(refused.value, str(status), served.url)


def told(error: EnvbuildError, *parts: str) -> None:
    """The error says what, why, and what to do, and no secret."""
    text = f"{error.what}\n{error.why}\n{error.fix}"
    assert all(part in text for part in parts), text
    assert all((error.what, error.why, error.fix))
    assert not [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("oci://127.0.0.1:9/team/store", None),
        ("oci://no-such-host.invalid/team/store", None),
        (f"s3://{BUCKET}", "http://127.0.0.1:9"),
        (f"s3://{BUCKET}", "https://no-such-host.invalid"),
    ],
)
def test_a_server_that_is_not_there_is_a_network_error(url: str, endpoint: str | None) -> None:
    remote = open_remote(url, endpoint=endpoint)
    for ask in (lambda: remote.find("things", KEY), lambda: remote.keys("things")):
        with pytest.raises(NetworkError) as refused:
            ask()
        told(refused.value, url, "cannot")


def test_a_bucket_that_is_not_there_is_no_empty_store(s3_address: str, tmp_path: Path) -> None:
    remote = open_remote("s3://no-such-bucket/x", endpoint=s3_address)
    actions: list[Callable[[], object]] = [
        lambda: remote.find("things", KEY),
        lambda: remote.keys("things"),
        lambda: push(remote, entry(tmp_path / "made")),
    ]
    for action in actions:
        with pytest.raises(NetworkError, match="does not exist") as refused:
            action()
        told(refused.value, "There is no bucket no-such-bucket")


def test_a_directory_that_is_not_mounted_is_no_empty_store(tmp_path: Path) -> None:
    remote = open_remote(f"file://{tmp_path}/share")
    for ask in (lambda: remote.find("things", KEY), lambda: push(remote, entry(tmp_path / "made"))):
        with pytest.raises(NetworkError, match="cannot be reached") as refused:
            ask()
        told(refused.value, "There is no such directory", "Mount")
    assert not (tmp_path / "share").exists()


def test_a_registry_with_a_password(closed_registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = closed_registry.removeprefix("http://")
    url = f"oci://{host}/team/closed"
    made = entry(tmp_path / "made")
    with pytest.raises(NetworkError) as refused:
        push(open_remote(url), made)
    told(refused.value, "401", "without a name", f"docker login {host}")

    wrong = write_docker_config(tmp_path / "wrong", {"auths": {host: {"auth": "YWxpOndyb25n"}}})
    with pytest.raises(NetworkError) as refused:
        push(open_remote(url, environ={**os.environ, **wrong}), made)
    told(refused.value, "401", f"as {USER}", str(tmp_path / "wrong/config.json"))

    right = write_docker_config(tmp_path / "right", {"auths": {host: {"auth": SECRETS[-1]}}})
    assert push(open_remote(url, environ={**os.environ, **right}), made) is Pushed.NEW

    asked = tmp_path / "asked"
    said = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    path = write_helper(tmp_path / "bin", "tests", f"cat > {asked}; echo '{said}'")
    helped = write_docker_config(tmp_path / "helped", {"credHelpers": {host: "tests"}})
    remote = open_remote(url, environ={**os.environ, **helped, "PATH": path})
    fetched(remote, tmp_path / "got")
    assert asked.read_text() == host


@pytest.mark.parametrize("profile", ["", "team"])
def test_keys_and_region_of_awss_own_files(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    for name in S3_KEYS:
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    section = profile or "default"
    keys = f"aws_access_key_id = AKIDFILE\naws_secret_access_key = {SECRETS[0]}\n"
    (tmp_path / ".aws/credentials").write_text(f"[{section}]\n{keys}")
    (tmp_path / ".aws/config").write_text(f"[{'profile ' if profile else ''}{section}]\nregion = eu-north-1\n")
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with fault_proxy(s3_address) as proxy:
        remote = open_remote(f"s3://{BUCKET}/files-{section}", endpoint=proxy.address)
        assert remote.find("things", KEY) is None
        ((_, _, headers), *_) = proxy.requests
        assert "Credential=AKIDFILE/" in headers["authorization"]
        assert "/eu-north-1/" in headers["authorization"]
        proxy.add(status=403)
        with pytest.raises(NetworkError) as refused:
            remote.find("things", KEY)
        told(refused.value, "403", f"profile {section}")


def test_a_full_disk_here_is_one(place: Place, tmp_path: Path) -> None:
    push(place.open(), entry(tmp_path / "made"))
    document = place.open().find("things", KEY)
    assert document is not None
    (tmp_path / "got/inner").mkdir(parents=True)
    (tmp_path / "got/inner/big.bin").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="is full"):
        place.open().fetch(document, tmp_path / "got")


def test_a_large_file_comes_back_whole(s3: Place, tmp_path: Path) -> None:
    """In parts, as obstore sends what is larger than a chunk."""
    big = os.urandom(19 << 20)
    push(s3.open(), entry(tmp_path / "made", big=big))
    assert s3.proxy.count("PUT", "partNumber") > 1
    fetched(s3.open(), tmp_path / "got")
    assert (tmp_path / "got/inner/big.bin").read_bytes() == big
