"""docker's registry with TLS and a password, and an image to publish there."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.fault_proxy import FaultProxy, fault_proxy
from helpers.published_copies import CopiedWorld, SharedPublication, share_publication
from helpers.stores import PASSWORD, USER, docker_registry, registry_program, write_docker_config

from envbuild.store import registry as registry_module
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry

OWN = (
    "DOCKER_CONFIG",
    "REGISTRY_AUTH_FILE",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "SSL_CERT_FILE",
    "PIP_CERT",
    "ENVBUILD_CONFIG",
)


def opened(host: str, repository: str, ca: Path | None = None) -> Registry:
    """A repository, for the account of the environment."""
    return Registry(parse_address(f"oci://{host}/{repository}"), ca, dict(os.environ))


@dataclass
class Secure:
    """The registry, and where its CA is."""

    host: str
    ca: Path

    def registry(self, repository: str) -> Registry:
        return opened(self.host, repository, self.ca)


@pytest.fixture(scope="session")
def registry_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return registry_program(shared_folder(tmp_path_factory) / "docker-registry")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedPublication:
    """One publication for the session, of which tests have copies."""
    return share_publication(tmp_path_factory.mktemp("world") / "project")


@pytest.fixture(scope="session")
def secure_registry(
    registry_binary: Path, shared: SharedPublication, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("registry") / "secure"
    with docker_registry(registry_binary, folder, password=True, tls=True) as address:
        host = address.removeprefix("https://")
        shared.registries[host] = folder
        yield Secure(host, folder / "ca.pem")


@pytest.fixture(scope="session")
def open_registry(
    registry_binary: Path, shared: SharedPublication, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Docker's registry, or the one at the address ENVBUILD_TEST_REGISTRY, such as one with the referrers API."""
    if other := os.environ.get("ENVBUILD_TEST_REGISTRY"):
        yield other
        return
    folder = tmp_path_factory.mktemp("registry") / "open"
    with docker_registry(registry_binary, folder) as address:
        shared.registries[address.removeprefix("http://")] = folder
        yield address


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An account that is logged in nowhere, and has less patience."""
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(registry_module, "BACKOFF_SECONDS", 0)


@pytest.fixture
def secure(secure_registry: Secure, account: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Secure:
    """The registry, for an account that is logged in there and trusts its CA."""
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    config = write_docker_config(tmp_path / "docker", {"auths": {secure_registry.host: {"auth": auth}}})
    monkeypatch.setenv("DOCKER_CONFIG", config["DOCKER_CONFIG"])
    monkeypatch.setenv("SSL_CERT_FILE", str(secure_registry.ca))
    return secure_registry


@pytest.fixture
def proxy(open_registry: str, shared: SharedPublication, account: None) -> Iterator[FaultProxy]:
    """A registry without a password, whose answers can be spoiled."""
    with fault_proxy(open_registry) as running:
        shared.proxies[running.host] = open_registry.removeprefix("http://"), running
        yield running


@pytest.fixture
def repository() -> str:
    """A repository of the test's own."""
    return f"team/t{time.time_ns()}"


@pytest.fixture
def registry(proxy: FaultProxy, repository: str) -> Registry:
    """That repository of the registry whose answers can be spoiled."""
    return opened(proxy.host, repository)


@pytest.fixture
def world(shared: SharedPublication, tmp_path: Path, account: None) -> CopiedWorld:
    return shared.copied_to(tmp_path / "project")
