"""The .sqsh made by enroot itself: for sites that want its very own, and for comparing."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from envbuild.core.digests import sha256_file
from envbuild.core.errors import BuildError, MachineError, disk_full
from envbuild.core.exit_status import describe_status, ran_out_of_space, tail
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import answer, run
from envbuild.image.record import SqshRecord
from envbuild.image.squashfs import enroot
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.registry_server import REPOSITORY, TAG, served
from envbuild.oci.write import RunConfig

# What `enroot import docker://` calls; its own message names one of them at a time.
NEEDED = ("curl", "grep", "awk", "jq", "parallel", "tar", "gzip", "find", "mksquashfs", "zstd")


def find_enroot() -> Path:
    """The program enroot, and all that its import calls.

    Raises:
        MachineError: something of it is not installed.
    """
    found = shutil.which("enroot")
    if found is None:
        raise MachineError(
            "enroot is not installed",
            why="--sqsh-builder enroot was asked for; the program enroot was looked for on PATH.",
            fix="Install it (see https://github.com/NVIDIA/enroot), or leave the option out: the native builder writes "
            "the same files and needs no enroot.",
        )
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise MachineError(
            f"enroot import cannot work without {', '.join(missing)}",
            why="These programs were looked for on PATH.",
            fix="Install them: apt-get install curl grep gawk jq parallel tar gzip findutils squashfs-tools zstd",
        )
    return Path(found)


@cache
def enroot_version() -> str:
    """The version that enroot tells: it decides what is in the .sqsh."""
    return f"enroot {answer([find_enroot(), 'version'], what='ask enroot for its version')}"


def import_sqsh(
    target: Path, layout: Path, image_digest: str, config: RunConfig, epoch: int, log: Path, compression: Compression
) -> SqshRecord:
    """Have enroot import the image in an OCI layout, which is served to it on loopback.

    The first line of its /etc/rc names that address, which differs from run to run; and so do the bytes.

    Raises:
        CheckRefusedError: the configuration would run code when a container starts.
        BuildError: enroot failed.
        MachineError: it is not installed, or the disk is full.
    """
    enroot.check(config)
    program = find_enroot()
    with machine_errors(target):
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".enroot."))
    try:
        with served(layout, image_digest) as registry:
            finished = run(
                [program, "import", "--output", target, f"docker://{registry}#{REPOSITORY}:{TAG}"],
                what="import the .sqsh",
                log=log,
                env=_environment(scratch, epoch, compression),
                check=False,
                whole=True,
            )
    finally:
        remove_tree(scratch)
    if finished.status != 0 or not target.is_file():
        target.unlink(missing_ok=True)
        if ran_out_of_space(finished.output, target.parent):
            raise disk_full(target.parent)
        raise BuildError(
            f"cannot import the .sqsh: enroot {describe_status(finished.status)}",
            why=tail(finished.output) or f"It wrote no {target.name}.",
            fix="See the log; or leave --sqsh-builder out, and the native builder writes it.",
            log=log,
        )
    with machine_errors(target):
        return SqshRecord(
            digest=sha256_file(target),
            size_bytes=target.stat().st_size,
            packed_by=enroot_version(),
            compression=" ".join(compression.words()),
        )


def _environment(scratch: Path, epoch: int, compression: Compression) -> dict[str, str]:
    """Settings of enroot: the caller's, and ours for places, compression and time."""
    ours = {f"ENROOT_{name}_PATH": str(scratch / name.lower()) for name in ("CACHE", "DATA", "TEMP", "RUNTIME")}
    for folder in ours.values():
        Path(folder).mkdir()
    ours |= {
        "ENROOT_ALLOW_HTTP": "yes",  # to loopback alone
        "ENROOT_SQUASH_OPTIONS": " ".join([*compression.words(), "-exit-on-error"]),
        "SOURCE_DATE_EPOCH": str(epoch),
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    return {**os.environ, **ours}
