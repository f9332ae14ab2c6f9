"""Stores that refuse, are not there, cut connections, or want a password."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fault_proxy import fault_proxy
from helpers.store_entries import BIG, KEY, SECRETS, Place, check_error, entry, fetched, push
from helpers.stores import (
    BUCKET,
    S3_KEYS,
    USER,
    write_docker_config,
)

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import MachineError, NetworkError
from envbuild.store.connect import open_remote
from envbuild.store.remote import Pushed

pytestmark = pytest.mark.usefixtures("own_account")


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


def test_a_server_that_is_busy_is_asked_again(served: Place, tmp_path: Path) -> None:
    for method in ("GET", "PUT", "POST", "HEAD"):
        served.proxy.add(method=method, times=1, status=503)
    assert push(served.open(), entry(tmp_path / "made")) is Pushed.NEW
    fetched(served.open(), tmp_path / "got")


def test_retry_after_is_honoured(oci: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time", SimpleNamespace(sleep=waited.append))
    oci.proxy.add(times=1, status=429, headers={"Retry-After": "2"})
    assert oci.open().find("things", KEY) is None
    assert waited == [2]


@pytest.mark.parametrize(
    ("action", "status"), [("find", 401), ("find", 403), ("push", 429), ("keys", 500), ("list_index", 503)]
)
def test_a_server_that_refuses_is_a_network_error(served: Place, tmp_path: Path, status: int, action: str) -> None:
    body = b'{"errors": [{"code": "DENIED", "message": "not you"}]}'
    served.proxy.add(status=status, body=body)
    remote = served.open()
    actions: dict[str, Callable[[], object]] = {
        "find": lambda: remote.find("things", KEY),
        "push": lambda: push(remote, entry(tmp_path / "made")),
        "keys": lambda: remote.keys("things"),
        "list_index": lambda: remote.list_index("things", ()),
    }
    with pytest.raises(NetworkError) as refused:
        actions[action]()
    check_error(refused.value, str(status), served.url)


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
        check_error(refused.value, url, "cannot")


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
        check_error(refused.value, "There is no bucket no-such-bucket")


def test_a_registry_with_a_password(closed_registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = closed_registry.removeprefix("http://")
    url = f"oci://{host}/team/closed"
    made = entry(tmp_path / "made")
    with pytest.raises(NetworkError) as refused:
        push(open_remote(url), made)
    check_error(refused.value, "401", "without a name", f"docker login {host}")

    wrong = write_docker_config(tmp_path / "wrong", {"auths": {host: {"auth": "YWxpOndyb25n"}}})
    with pytest.raises(NetworkError) as refused:
        push(open_remote(url, environ={**os.environ, **wrong}), made)
    check_error(refused.value, "401", f"as {USER}", str(tmp_path / "wrong/config.json"))

    right = write_docker_config(tmp_path / "right", {"auths": {host: {"auth": SECRETS[-1]}}})
    remote = open_remote(url, environ={**os.environ, **right})
    assert push(remote, made) is Pushed.NEW
    fetched(remote, tmp_path / "got")


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
        check_error(refused.value, "403", f"profile {section}")


def test_a_full_disk_here_is_one(place: Place, tmp_path: Path) -> None:
    push(place.open(), entry(tmp_path / "made"))
    document = place.open().find("things", KEY)
    assert document is not None
    (tmp_path / "got/inner").mkdir(parents=True)
    (tmp_path / "got/inner/big.bin").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="is full"):
        place.open().fetch(document, tmp_path / "got")
