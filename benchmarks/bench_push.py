"""What pushing an image of 3 GB to a registry on loopback costs, against `skopeo copy` of the same layout in one run;
and how much is sent when one component of a published image moved.

The registry is docker's (Debian's package docker-registry), with TLS and a password. Both pushes go to repositories of
their own in a registry without any of the blobs, in turns: the medians are compared.

    benchmarks/bench_push.py [--repeats N] [--size-mb N]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from envbuild.core.digests import sha256_file
from envbuild.oci.models import MANIFEST_TYPE, RunConfig
from envbuild.oci.push import Blob, RegistryManifest, push_blobs, put_manifest
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.store.address import parse_address
from envbuild.store.registry import Registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.stores import PASSWORD, USER, docker_registry, registry_program, write_docker_config

LIMIT_RATIO = 1.2
LIMIT_MOVED = 0.02
# As in an image of stack mcore: torch and CUDA's libraries are most of it, megatron-core is small.
SHARES = {"base": 0.05, "torch": 0.45, "cuda": 0.3, "others": 0.193, "megatron-core": 0.006, "configuration": 0.001}


def write_image(folder: Path, size_bytes: int, moved: int) -> tuple[RegistryManifest, list[Blob]]:
    """A layout of layers that nothing compresses; another number of ``moved`` gives another megatron-core alone."""
    layers = []
    for name, share in SHARES.items():
        file = folder / f"{name}-{moved if name == 'megatron-core' else 0}"
        if not file.is_file():
            with file.open("wb") as out:
                left = int(size_bytes * share)
                while left > 0:
                    out.write(os.urandom(min(left, 1 << 24)))
                    left -= 1 << 24
        size = file.stat().st_size
        record = LayerRecord(
            name=name, digest=sha256_file(file), diff_id=f"sha256:{moved:064}", size_bytes=size, unpacked_bytes=size,
            entries=1,
        )  # fmt: skip
        layers.append(Layer(record, file))
    image = make_oci(RunConfig(), "linux/amd64", [layer.record for layer in layers], 1)
    layout = folder / f"layout{moved}"
    if not layout.is_dir():
        write_layout(layout, image, layers, tag="image")
    manifest = RegistryManifest(content=image.manifest, media_type=MANIFEST_TYPE)
    digests = {layer.record.digest: layer.record.size_bytes for layer in layers}
    digests[image.config_digest] = len(image.config)
    blobs = [
        Blob(digest=digest, size_bytes=size, file=layout / "blobs/sha256" / digest.removeprefix("sha256:"))
        for digest, size in digests.items()
    ]
    return manifest, blobs


def push(registry: Registry, manifest: RegistryManifest, blobs: list[Blob]) -> tuple[float, int]:
    """Seconds, and bytes sent."""
    begun = time.monotonic()
    sent = push_blobs(registry, blobs)
    put_manifest(registry, "image", manifest)
    return time.monotonic() - begun, sent.bytes_sent + len(manifest.content)


def skopeo(layout: Path, to: str, certificates: Path) -> float:
    begun = time.monotonic()
    words = ["skopeo", "--insecure-policy", "copy", "--quiet", f"--dest-cert-dir={certificates}"]
    subprocess.run(
        [*words, f"--dest-creds={USER}:{PASSWORD}", f"oci:{layout}:image", f"docker://{to}:image"], check=True
    )
    return time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size-mb", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-push-") as name:
        folder = Path(name)
        program = registry_program(folder / "registry-program")
        manifest, blobs = write_image(folder, options.size_mb * 10**6, 0)
        total = sum(blob.size_bytes for blob in blobs)
        ours, theirs, environ = [], [], dict(os.environ)
        for repeat in range(options.repeats):
            place = folder / f"registry{repeat}"
            with docker_registry(program, place, password=True, tls=True) as address:
                host = address.removeprefix("https://")
                auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                environ |= write_docker_config(place / "docker", {"auths": {host: {"auth": auth}}})
                (place / "certs").mkdir()
                shutil.copy(place / "ca.pem", place / "certs/ca.crt")
                registry = Registry(parse_address(f"oci://{host}/ours"), place / "ca.pem", environ)
                # In turns, so that a disk that was filled by the one before is nobody's advantage.
                for turn in ("ours", "theirs") if repeat % 2 == 0 else ("theirs", "ours"):
                    os.sync()
                    if turn == "ours":
                        ours.append(push(registry, manifest, blobs)[0])
                    else:
                        theirs.append(skopeo(folder / "layout0", f"{host}/theirs", place / "certs"))
                if repeat == options.repeats - 1:
                    moved = push(registry, *write_image(folder, options.size_mb * 10**6, 1))[1]
            shutil.rmtree(place)
    ratio = statistics.median(ours) / statistics.median(theirs)
    share = moved / total
    result = {
        "size_bytes": total,
        "envbuild_seconds": [round(value, 2) for value in ours],
        "skopeo_seconds": [round(value, 2) for value in theirs],
        "ratio": round(ratio, 3),
        "moved_bytes_sent": moved,
        "moved_share": round(share, 5),
    }
    print(json.dumps(result, indent=2))
    missed = ratio > LIMIT_RATIO or share > LIMIT_MOVED
    print(
        f"push / skopeo copy: {ratio:.2f} (at most {LIMIT_RATIO}); one component moved: {share:.2%} sent (at most 2%)"
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
