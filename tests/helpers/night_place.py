"""Where nights publish: a registry with TLS and a password, an object store, and a key that both ends trust."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.stores import (
    BUCKET,
    PASSWORD,
    S3_KEYS,
    USER,
    docker_registry,
    registry_program,
    s3_server,
    write_docker_config,
)

from envbuild.catalog.site import CA_FILES
from envbuild.oci.push import digest_of_tag
from envbuild.publish.index import read_index
from envbuild.publish.models import Publication
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry

if TYPE_CHECKING:
    from conftest import Tool


@dataclass(frozen=True)
class Place:
    """Where nights publish, and an account that may."""

    host: str
    ca: Path
    env: dict[str, str]
    keys: Path

    def registry(self, repository: str) -> Registry:
        return Registry(parse_address(f"oci://{self.host}/{repository}"), self.ca, {**os.environ, **self.env})

    def published(self, repository: str) -> list[Publication]:
        """What the index names; every tag of it names what it says."""
        registry = self.registry(repository)
        found = list(read_index(registry))
        for item in found:
            assert digest_of_tag(registry, item.tag) == item.oci_digest
            assert digest_of_tag(registry, item.moving_tag) == item.oci_digest
        return found

    def words(self, repository: str, prefix: str) -> list[str]:
        """The options of a night that publishes there."""
        where = ["--to", f"{self.host}/{repository}", "--sqsh-to", f"s3://{BUCKET}/{prefix}/sqsh"]
        own = ["--key", str(self.keys / "lab.key"), "--trust", str(self.keys / "trust.toml")]
        return [*where, "--state", f"s3://{BUCKET}/{prefix}/state", *own]


@contextlib.contextmanager
def night_place(tool: Tool, folder: Path, shared: Path) -> Iterator[Place]:
    """The place while the block runs; ``shared``: a folder for the registry's program."""
    binary, secure, keys = registry_program(shared / "docker-registry"), folder / "secure", folder / "keys"
    tool.run("certificate", "keygen", "--out", str(keys), "--name", "lab")
    (keys / "trust.toml").write_text('[keys.lab]\nfile = "lab.pub"\n')
    with docker_registry(binary, secure, password=True, tls=True) as address, s3_server() as s3:
        host = address.removeprefix("https://")
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        config = write_docker_config(secure / "docker", {"auths": {host: {"auth": auth}}})
        # uv and git go on with the CAs of the machine.
        bundle = secure / "bundle.pem"
        own = next((Path(name).read_text() for name in CA_FILES if Path(name).is_file()), "")
        bundle.write_text(own + (secure / "ca.pem").read_text())
        env = {**config, **S3_KEYS, "AWS_ENDPOINT_URL": s3, "SSL_CERT_FILE": str(bundle), "NO_PROXY": "127.0.0.1"}
        yield Place(host, secure / "ca.pem", {**env, "no_proxy": "127.0.0.1"}, keys)
