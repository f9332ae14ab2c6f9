"""Puts a .sqsh into a cluster's image folder, once for each digest."""

from __future__ import annotations

import os
from pathlib import Path

from envbuild.core.files import machine_errors
from envbuild.launch.slurm.login import LoginShell

# An image of 10 GB over a link of 100 Mb/s.
LIMIT_SECONDS = 3600.0
# Jobs open the file by this name: it appears whole, and another certification that brings the same image waits. What is
# there is read again, as a job would find out only when its GPUs are waiting.
_SCRIPT = """\
set -eu
mkdir -p -- "$1"
cd -- "$1"
exec 9>".$2.lock"
flock 9
is_right() { [ -f "$1" ] && [ "$(stat -c %s -- "$1")" = "$2" ] && echo "$3  $1" | sha256sum --check --status; }
! is_right "$2" "$3" "$4" || { cat >/dev/null; exit 0; }
trap 'rm -f -- "$2.partial"' EXIT
cat >"$2.partial"
is_right "$2.partial" "$3" "$4" || { echo "what arrived has another digest"; exit 1; }
chmod a+r -- "$2.partial"
mv -f -- "$2.partial" "$2"
"""


def place_image(sqsh: Path, digest: str, folder: str, login: str | None) -> str:
    """The path of an image in a folder on shared storage, where it is put unless it is there.

    Args:
        login: the host that reaches the folder; None: this machine does.

    Raises:
        MachineError: the folder cannot be written, its disk is full, or the host cannot be reached.
    """
    hexadecimal = digest.removeprefix("sha256:")
    name = f"{hexadecimal}.sqsh"
    words = ["sh", "-c", _SCRIPT, "sh", folder, name, str(sqsh.stat().st_size), hexadecimal]
    where = folder if login is None else f"{login}:{folder}"
    with machine_errors(sqsh):
        descriptor = os.open(sqsh, os.O_RDONLY | os.O_CLOEXEC)
    try:
        LoginShell(host=login).run(
            words,
            what=f"put the image into {where}",
            seconds=LIMIT_SECONDS,
            stdin=descriptor,
            fix="It is image.folder of the cluster's file, or images/ in folder: it has to be writable, with room for "
            f"{sqsh.stat().st_size / 1e9:.1f} GB.",
        )
    finally:
        os.close(descriptor)
    return f"{folder}/{name}"
