"""Real servers for remote stores, on loopback: docker's registry and an S3 service; and wheels to put there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from helpers.tls import write_tls
from helpers.wheels import make_wheel

from envbuild.core import locks
from envbuild.core.digests import sha256_file
from envbuild.store.local import LocalStore
from envbuild.store.remote import Remote
from envbuild.wheels.cache.entry import Built, WheelRecord, fill
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.key import KeyParts

BUCKET = "wheels"
S3_KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "open-sesame-s3", "AWS_REGION": "us-east-1"}
USER, PASSWORD = "ali", "open sesame"
# bcrypt of PASSWORD, the only form that the registry takes.
HTPASSWD = f"{USER}:$2b$04$O2Q9x/69/eSYPKqeP3AFtOp1eXmj40TA1pvupNP7sP0fqOM6CYplC\n"
REGISTRY = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {folder}/data}}
  delete: {{enabled: true}}
{more}http: {{addr: "127.0.0.1:{port}"{tls}}}
{auth}
"""
AUTH = "auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}"


def registry_program(folder: Path) -> Path:
    """Docker's registry: this machine's, else Debian's package, unpacked into a folder without being installed."""
    found = shutil.which("docker-registry")
    if found:
        return Path(found)
    program = folder / "usr/bin/docker-registry"
    with locks.exclusive(folder.with_suffix(".lock")):
        if not program.is_file():
            loading = folder / "download"
            loading.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", "-qq", "docker-registry"], cwd=loading, check=True)
            (package,) = loading.glob("*.deb")
            subprocess.run(["dpkg", "-x", package, folder], check=True)
    return program


@contextlib.contextmanager
def docker_registry(
    program: Path, folder: Path, *, password: bool = False, tls: bool = False, read_only: bool = False
) -> Iterator[str]:
    """The registry with a folder and a port of its own; gives its address, ``http://HOST:PORT`` or ``https:``.

    Args:
        tls: its certificate is signed by the CA in ``folder/ca.pem``.
        read_only: it takes no uploads.
    """
    folder.mkdir(parents=True)
    if tls:
        write_tls(folder)
    (folder / "htpasswd").write_text(HTPASSWD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    auth = AUTH.format(folder=folder) if password else ""
    secured = f", tls: {{certificate: {folder}/server.pem, key: {folder}/server.key}}" if tls else ""
    more = "  maintenance: {readonly: {enabled: true}}\n" if read_only else ""
    config = REGISTRY.format(folder=folder, port=port, auth=auth, tls=secured, more=more)
    (folder / "config.yml").write_text(config)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "log")
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while True:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v2/")
            connection.getresponse()
            connection.close()
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """An S3 service with an empty bucket; gives its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        for path, method in (("moto-api/reset", "POST"), (BUCKET, "PUT")):
            request = urllib.request.Request(f"{address}/{path}", method=method)
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()
        yield address
    finally:
        server.stop()


def write_docker_config(folder: Path, content: dict[str, object]) -> dict[str, str]:
    """A configuration of docker; gives the variable that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return {"DOCKER_CONFIG": str(folder)}


def write_helper(folder: Path, name: str, body: str) -> str:
    """A credential helper that is a shell script; gives a PATH with it."""
    folder.mkdir(parents=True, exist_ok=True)
    helper = folder / f"docker-credential-{name}"
    helper.write_text(f"#!/bin/sh\n{body}\n")
    helper.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def keep_wheel(
    store: LocalStore,
    parts: KeyParts,
    folder: Path,
    *,
    module: str = "",
    remotes: tuple[Remote, ...] = (),
    lock: str = "",
) -> Built:
    """A wheel without GPU code and with these parts, built into the wheelhouse of a store."""
    wheel = make_wheel(
        folder, parts.package.replace("-", "_"), parts.version, "cp310-cp310-linux_x86_64", module=module
    )
    log = folder / "log"
    log.write_text(
        f"compiled in {store.root}/staging with {Path.home()}/bin/nvcc from https://me:secret@example.org/\n"
    )

    def build(entry: Path) -> None:
        fill(entry, wheel, record_of(parts, wheel), log)

    return Wheelhouse(store, remotes, lock).get_or_build(parts.key, build)


def record_of(parts: KeyParts, wheel: Path) -> WheelRecord:
    """The record of a wheel without GPU code."""
    return WheelRecord(
        key=parts.key,
        parts=parts,
        file=wheel.name,
        digest=sha256_file(wheel),
        size_bytes=wheel.stat().st_size,
        sm=(),
        ptx=(),
        libraries=(),
        glibc="2.34",
        imported=(),
        not_imported={},
        build_seconds=1.0,
        jobs=1,
    )
