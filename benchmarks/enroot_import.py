"""What `enroot import` of an image costs and makes, against envbuild's own .sqsh of it, in the same run.

    benchmarks/enroot_import.py out/images/NAME

enroot takes images from registries, so it is served the OCI layout on loopback. It needs curl, jq, parallel,
squashfs-tools and zstd; `unsquashfs` lists both files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from registry_server import REPOSITORY, TAG, served

from envbuild.image.record import ImageRecord
from envbuild.image.squashfs.compression import DEFAULT
from envbuild.store.record import load


def enroot_import(target: Path, registry: str, epoch: int, scratch: Path) -> float:
    """Seconds of an import; the first line of its /etc/rc names the address, so its bytes are never the same."""
    environment = {f"ENROOT_{name}_PATH": str(scratch / name.lower()) for name in ("CACHE", "DATA", "TEMP", "RUNTIME")}
    for folder in environment.values():
        Path(folder).mkdir()
    environment |= {
        "ENROOT_ALLOW_HTTP": "yes",
        "ENROOT_SQUASH_OPTIONS": " ".join([*DEFAULT.options(), "-exit-on-error"]),
        "SOURCE_DATE_EPOCH": str(epoch),
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    started = time.perf_counter()
    command = ["enroot", "import", "--output", target, f"docker://{registry}#{REPOSITORY}:{TAG}"]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    return time.perf_counter() - started


def listing(sqsh: Path) -> set[bytes]:
    """Mode, owner and path of every entry; times and sizes of directories are the file system's own."""
    lines = subprocess.run(["unsquashfs", "-lln", sqsh], capture_output=True, check=True).stdout.splitlines()
    fields = [line.split(maxsplit=5) for line in lines if b"squashfs-root" in line]
    return {b" ".join([field[0], field[1], field[5]]) for field in fields}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    image = parser.parse_args().image
    record = load(image / "record.json", ImageRecord)
    with tempfile.TemporaryDirectory() as scratch, served(image / "oci", record.oci_digest) as registry:
        target = Path(scratch) / "enroot.sqsh"
        seconds = enroot_import(target, registry, record.source_date_epoch, Path(scratch))
        theirs, ours = listing(target), listing(image / "image.sqsh")
        print(f"enroot import: {seconds:.1f} s, {target.stat().st_size} bytes")
        print(f"envbuild's .sqsh: {(image / 'image.sqsh').stat().st_size} bytes")
        for line in sorted(theirs ^ ours):
            print("only enroot " if line in theirs else "only envbuild ", line.decode(errors="replace"))
        return int(theirs != ours)


if __name__ == "__main__":
    sys.exit(main())
