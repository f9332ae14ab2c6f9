"""What publishing sends when megatron-core alone moved, next to `docker push` of an environment in one layer.

A registry on loopback and a dockerd on a private socket, both Debian's. The layers are stand-ins of random bytes in the
sizes of stack mcore (bench_push.py); counted are the bytes of blobs that the second publication put into the registry.

    benchmarks/bench_publish_delta.py [--size-mb N]

Exits 1 when the image's part is more than 2%.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from bench_push import LIMIT_MOVED, SHARES
from helpers.docker_daemon import docker_daemon, docker_programs
from helpers.locks import MAIN
from helpers.publish_world import make_publish_world
from helpers.stores import docker_registry, registry_program

from envbuild.publish.publish import publish

MOVED = "megatron-core"


def blob_bytes(data: Path) -> int:
    return sum(file.stat().st_size for file in data.rglob("blobs/sha256/*/*/data"))


def write_layers(size_bytes: int) -> dict[str, bytes]:
    return {name: os.urandom(int(size_bytes * share)) for name, share in SHARES.items()}


def docker_pushes(folder: Path, host: str, versions: list[dict[str, bytes]], data: Path) -> list[int]:
    """The bytes that each push of an image with base and environment in two layers put into the registry."""
    sent = []
    with docker_daemon(
        folder / "docker", docker_programs(folder / "docker-programs"), "--storage-driver=vfs"
    ) as daemon:
        environment = {**os.environ, "DOCKER_HOST": daemon.host, "DOCKER_BUILDKIT": "0", "DOCKER_API_VERSION": "1.41"}
        for number, layers in enumerate(versions):
            build = folder / f"build{number}"
            (build / "venv").mkdir(parents=True)
            for name, content in layers.items():
                (build / ("base" if name == "base" else f"venv/{name}")).write_bytes(content)
            (build / "Dockerfile").write_text("FROM scratch\nCOPY base /base\nCOPY venv /opt/venv\n")
            tag, before = f"{host}/docker/image:{number}", blob_bytes(data)
            for words in (["build", "--quiet", "--tag", tag, str(build)], ["push", "--quiet", tag]):
                subprocess.run(["docker", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
            sent.append(blob_bytes(data) - before)
    return sent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=300)
    options = parser.parse_args()
    os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    first = write_layers(options.size_mb * 10**6)
    versions = [first, {**first, MOVED: os.urandom(len(first[MOVED]))}]
    with tempfile.TemporaryDirectory(prefix="bench-delta-") as name:
        folder = Path(name)
        place = folder / "registry"
        with docker_registry(registry_program(folder / "program"), place) as address:
            host = address.removeprefix("http://")
            world = make_publish_world(folder / "project")
            ours, with_sqsh = [], []
            for number, layers in enumerate(versions):
                world.rebuild(layers, MAIN.replace("0.30", f"0.3{number}"))
                world.certify()
                for to, sqsh, sent in ((f"{host}/ours", False, ours), (f"{host}/with-sqsh", True, with_sqsh)):
                    before = blob_bytes(place / "data")
                    published = publish(world.request(to, sqsh=sqsh), world.context)
                    # Blobs are shared between repositories on the registry's disk: what is sent is counted there for
                    # the first, and by the publisher for the second.
                    sent.append(published.bytes_sent if sqsh else blob_bytes(place / "data") - before)
            docker = docker_pushes(folder, host, versions, place / "data")
    total = sum(map(len, first.values()))
    result = {
        "image_bytes": total,
        "envbuild_oci_bytes": ours[1],
        "envbuild_sqsh_bytes": with_sqsh[1],
        "docker_bytes": docker[1],
        "envbuild_oci_share": round(ours[1] / total, 5),
        "docker_share": round(docker[1] / total, 5),
        "docker / envbuild": round(docker[1] / ours[1], 1),
    }
    print(json.dumps(result, indent=2))
    return int(ours[1] / total > LIMIT_MOVED)


if __name__ == "__main__":
    sys.exit(main())
