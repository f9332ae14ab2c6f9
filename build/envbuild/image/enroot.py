"""What enroot puts into a .sqsh besides the layers: four files in /etc, and its rules for owners and modes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from envbuild.catalog.data import data_root
from envbuild.image.oci import RunConfig

# enroot excludes what lies in dev, and keeps the directory.
DROPPED_BELOW = "dev/"
# bash's own names for control characters in $'...'; all others are written in octal.
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 27: "E"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def quote(word: str) -> str:
    """``word`` as bash's ``${word@Q}`` writes it: in single quotes, or as ``$'...'`` with control characters."""
    if word == "'":
        return "\\'"  # bash's own exception
    if not _CONTROL.search(word):
        return "'" + word.replace("'", "'\\''") + "'"
    pieces = []
    for character in word:
        code = ord(character)
        if code in _ESCAPES:
            pieces.append("\\" + _ESCAPES[code])
        elif code < 32 or code == 127:
            pieces.append(f"\\{code:03o}")
        elif character in "'\\":
            pieces.append("\\" + character)
        else:
            pieces.append(character)
    return "$'" + "".join(pieces) + "'"


def files(config: RunConfig, provenance: str) -> dict[str, bytes]:
    """The four files by their path in the image.

    Args:
        provenance: what the first line of ``/etc/rc`` says about where the image came from.
    """
    environment = "".join(f"{entry}\n" for entry in config.environment)
    fstab = "".join(
        f"${{ENROOT_ROOTFS}}{volume} {volume} none x-create=dir,bind,rw,nosuid,nodev\n"
        for volume in sorted(config.volumes)
    )
    return {
        "etc/rc": rc(config, provenance).encode(),
        "etc/rc.local": (data_root() / "containers/enroot/rc.local").read_bytes(),
        "etc/environment": environment.encode(),
        "etc/fstab": fstab.encode(),
    }


def rc(config: RunConfig, provenance: str) -> str:
    """``/etc/rc``, which starts a container: changes directory, sources ``/etc/rc.local``, runs the command."""
    lines = [f"# enroot-provenance: {provenance}"]
    lines += [f"# {key} {value}".replace("\n", " ") for key, value in sorted(config.labels)]
    workdir = config.workdir or "/"
    command = _words(config.command)
    if not config.entrypoint and not config.command:
        command = ["'/bin/sh'"]
    entrypoint = " ".join(_words(config.entrypoint))
    return "\n".join(
        [
            *lines,
            "",
            f'mkdir -p "{workdir}" 2> /dev/null',
            f'cd "{workdir}" && unset OLDPWD || exit 1',
            "",
            "if [ -s /etc/rc.local ]; then",
            "    . /etc/rc.local",
            "fi",
            "",
            "if [ $# -gt 0 ]; then",
            f'    exec {entrypoint} "$@"',
            "else",
            f"    exec {entrypoint} {' '.join(command)}",
            "fi",
            "",
        ]
    )


def _words(words: Sequence[str]) -> list[str]:
    """The words, quoted. enroot reads them a line each, so a word with a newline becomes two."""
    return [quote(line) for word in words for line in word.split("\n")]


def mode(value: int, *, directory: bool) -> int:
    """A mode as enroot leaves it: ``chmod u+rX``, and directories that their owner may write."""
    value |= 0o400
    if directory:
        return value | 0o300
    return value | 0o100 if value & 0o111 else value
