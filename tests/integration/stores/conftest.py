"""Real servers for remote stores, and a proxy before each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.fault_proxy import fault_proxy
from helpers.store_entries import Place
from helpers.stores import (
    BUCKET,
    S3_KEYS,
    docker_registry,
    registry_program,
    s3_server,
)

from envbuild.store import bucket, registry, repository


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


@pytest.fixture
def own_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Variables of an account that has keys for buckets, and is logged in nowhere; and less patience."""
    for name, value in {**S3_KEYS, "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in (
        "DOCKER_CONFIG",
        "REGISTRY_AUTH_FILE",
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "AWS_ENDPOINT_URL",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    # The same number of tries, in less time.
    monkeypatch.setattr(registry, "BACKOFF_SECONDS", 0)
    monkeypatch.setattr(repository, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(bucket, "RETRIES", 3)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "open-sesame-gs")


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


@pytest.fixture(params=["s3", "gs", "file"])
def with_objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """What has objects by their paths."""
    yield from _place(request.param, request, tmp_path)


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
                proxy.translate, proxy.translate_back = as_s3, as_google
            yield Place(f"{kind}://{BUCKET}/{own}", proxy.address, proxy)


def as_s3(headers: dict[str, str]) -> dict[str, str]:
    """Google's XML API is S3's but for the condition of a put and the credentials."""

    def translated(name: str, value: str) -> tuple[str, str]:
        if name.lower() != "x-goog-if-generation-match":
            return name, value
        return ("If-None-Match", "*") if value == "0" else ("If-Match", f'"{int(value):032x}"')

    return dict(translated(name, value) for name, value in headers.items())


def as_google(headers: dict[str, str]) -> dict[str, str]:
    """The entity tag of S3's answers (an MD5, or that of the parts and their number) as a generation, a number."""
    tag = next((value for name, value in headers.items() if name.lower() == "etag"), "")
    digits = tag.strip('"').partition("-")[0]
    return {**headers, "x-goog-generation": str(int(digits, 16))} if digits else headers
