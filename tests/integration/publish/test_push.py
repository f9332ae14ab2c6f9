"""Blobs on the way to docker's registry: chunks, cuts, mounts, registries that are busy, full or read-only."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.publish_world import PublishWorld
from helpers.stores import docker_registry, write_docker_config
from helpers.tls import write_tls
from integration.publish.conftest import Secure, opened

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import EnvbuildError, NetworkError
from envbuild.oci.push import Blob, push_blobs
from envbuild.publish.index import read_index
from envbuild.publish.publish import publish
from envbuild.store import upload
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags
from envbuild.store.upload import has_blob, upload_blob

CHUNK = 100_000
CONTENT = os.urandom(950_000)
DIGEST = sha256_bytes(CONTENT)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of ten chunks."""
    monkeypatch.setattr(upload, "CHUNK_BYTES", CHUNK)
    path = tmp_path / "blob"
    path.write_bytes(CONTENT)
    return path


def test_a_blob_goes_in_chunks(proxy: FaultProxy, registry: Registry, file: Path) -> None:
    assert upload_blob(registry, file, DIGEST, len(CONTENT)) == len(CONTENT)
    assert has_blob(registry, DIGEST, len(CONTENT))
    ranges = [headers["Content-Range"] for method, _, headers in proxy.requests if method == "PATCH"]
    assert ranges[0] == f"0-{CHUNK - 1}"
    assert ranges[-1] == f"900000-{len(CONTENT) - 1}"
    assert len(ranges) == 10


@pytest.mark.parametrize(
    "fault",
    [
        {"cut_request": 60_000},
        {"status": 503},
        {"status": 429, "headers": {"Retry-After": "0"}},
        {"status": 404},
        {"status": 416},
    ],
    ids=["cut", "503", "429", "forgotten", "out of step"],
)
def test_an_upload_goes_on_where_it_was(
    proxy: FaultProxy, registry: Registry, file: Path, fault: dict[str, object]
) -> None:
    kept, seen = proxy.fault_for, 0

    def third(method: str, path: str) -> object:
        nonlocal seen
        seen += method == "PATCH"
        return kept(method, path) if method == "PATCH" and seen == 4 else None

    proxy.add(method="PATCH", **fault)
    proxy.fault_for = third  # type: ignore[method-assign,assignment]
    sent = upload_blob(registry, file, DIGEST, len(CONTENT))
    assert has_blob(registry, DIGEST, len(CONTENT))
    assert sent <= len(CONTENT) + CHUNK
    assert proxy.count("POST", "uploads") == 1


def test_only_the_answer_of_the_last_request_was_lost(proxy: FaultProxy, registry: Registry, file: Path) -> None:
    proxy.add(method="PUT", path="uploads", times=1, drop_answer=True)
    upload_blob(registry, file, DIGEST, len(CONTENT))
    assert has_blob(registry, DIGEST, len(CONTENT))


@pytest.mark.parametrize("status", [405, 400, 501])
def test_a_registry_without_chunks_gets_the_whole(
    proxy: FaultProxy, registry: Registry, file: Path, status: int
) -> None:
    proxy.add(method="PATCH", status=status)
    upload_blob(registry, file, DIGEST, len(CONTENT))
    assert has_blob(registry, DIGEST, len(CONTENT))
    assert proxy.count("PATCH") == 1


def test_a_registry_that_drops_every_third_request(proxy: FaultProxy, repository: str, world: PublishWorld) -> None:
    world.certify()
    to = f"{proxy.host}/{repository}"
    fault, count = proxy.add(status=500), 0

    def every_third(method: str, path: str) -> object:
        nonlocal count
        count += 1
        return fault if count % 3 == 0 else None

    proxy.fault_for = every_third  # type: ignore[method-assign,assignment]
    publication = publish(world.request(to), world.context).publication
    proxy.fault_for = lambda method, path: None  # type: ignore[method-assign]
    assert read_index(opened(proxy.host, repository)) == (publication,)
    assert publish(world.request(to), world.context).nothing_to_do


def test_a_file_that_changes_on_the_way_is_refused_by_its_digest(
    proxy: FaultProxy, registry: Registry, file: Path
) -> None:
    file.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(NetworkError, match="refuses"):
        upload_blob(registry, file, DIGEST, len(CONTENT))
    assert not has_blob(registry, DIGEST, len(CONTENT))


def test_a_quota_that_is_used_up_on_the_way(proxy: FaultProxy, repository: str, world: PublishWorld) -> None:
    """What is there stays, no tag names the half of it, and the next run goes on."""
    world.certify()
    to = f"{proxy.host}/{repository}"
    big = next(layer for layer in world.image.record.layers if layer.name == "torch")
    denied = b'{"errors": [{"code": "DENIED", "message": "project quota exceeded"}]}'
    fault = proxy.add(method="PUT", path=big.digest, status=403, body=denied)
    with pytest.raises(NetworkError) as caught:
        publish(world.request(to), world.context)
    assert "project quota exceeded" in caught.value.why
    registry = opened(proxy.host, repository)
    assert list_tags(registry) == []
    fault.times = 0
    again = publish(world.request(to), world.context)
    assert again.sent.present > 0
    assert read_index(registry) == (again.publication,)


def test_a_read_only_repository(registry_binary: Path, tmp_path: Path, world: PublishWorld) -> None:
    world.certify()
    with (
        docker_registry(registry_binary, tmp_path / "read-only", read_only=True) as address,
        pytest.raises(NetworkError) as caught,
    ):
        publish(world.request(f"{address.removeprefix('http://')}/team/a"), world.context)
    assert "status 405" in caught.value.what
    assert "read-only" in caught.value.fix


def test_expired_credentials(secure: Secure, repository: str, world: PublishWorld, tmp_path: Path) -> None:
    world.certify()
    auth = base64.b64encode(b"ali:last-years-password").decode()
    write_docker_config(tmp_path / "docker", {"auths": {secure.host: {"auth": auth}}})
    with pytest.raises(NetworkError, match="status 401") as caught:
        publish(world.request(f"{secure.host}/{repository}"), world.context)
    assert "docker login" in caught.value.fix
    assert "last-years" not in str(caught.value.as_json())


def test_another_ca(
    secure: Secure, repository: str, world: PublishWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.certify()
    (tmp_path / "other").mkdir()
    write_tls(tmp_path / "other")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "other" / "ca.pem"))
    with pytest.raises(NetworkError) as caught:
        publish(world.request(f"{secure.host}/{repository}"), world.context)
    assert "certificate" in caught.value.why
    assert "ca_bundle" in caught.value.fix


def test_one_blob_that_fails_ends_the_others(proxy: FaultProxy, repository: str, tmp_path: Path) -> None:
    blobs = []
    for number in range(12):
        content = bytes([number]) * 1000
        (tmp_path / str(number)).write_bytes(content)
        blobs.append(Blob(digest=sha256_bytes(content), size_bytes=1000, file=tmp_path / str(number)))
    proxy.add(method="POST", status=403)
    with pytest.raises(EnvbuildError, match="status 403"):
        push_blobs(opened(proxy.host, repository), blobs, parallel=3)
    assert proxy.count("POST") <= 3
