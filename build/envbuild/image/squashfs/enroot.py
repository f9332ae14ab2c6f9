"""What enroot puts into a .sqsh besides the layers: four files in /etc, and its rules for owners and modes."""

from __future__ import annotations

import re

from envbuild.catalog.data import data_root
from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import RunConfig

# Directories that enroot empties.
EMPTIED = ("dev",)
# enroot writes them into double quotes of a shell script, and into a line of a fstab, as they are.
_RUNS_IN_QUOTES = re.compile(r"[\"$`\\\x00-\x1f\x7f]")
_BREAKS_FSTAB = re.compile(r"[\s\"'$`\\#\x00-\x1f\x7f]")


def check(config: RunConfig) -> None:
    """Refuse what a container would run as code or mount from outside: enroot writes it unquoted.

    Raises:
        CheckRefusedError: the working directory or a volume would do that.
    """
    if config.workdir and (_RUNS_IN_QUOTES.search(config.workdir) or not _is_plain(config.workdir)):
        raise CheckRefusedError(
            f"the image's working directory {config.workdir!r} cannot go into a .sqsh",
            why="/etc/rc, which starts the container, has it between double quotes: a shell would read the characters "
            "\" $ ` \\ and line ends in it as its own. It must also be absolute and without '..'.",
            fix="Give the image another WORKDIR.",
        )
    for volume in config.volumes:
        if _BREAKS_FSTAB.search(volume) or not _is_plain(volume):
            raise CheckRefusedError(
                f"the image's volume {volume!r} cannot go into a .sqsh",
                why="/etc/fstab has a line for each, and what is between blanks is a field: it would mount something "
                "else. A volume must be absolute, without '..', blanks, quotes, #, $, ` and \\.",
                fix="Remove the VOLUME from the image.",
            )


def _is_plain(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")


def files(config: RunConfig, provenance: str) -> dict[str, bytes]:
    """The four files by their path in the image.

    Args:
        provenance: where the image came from, for the first line of ``/etc/rc``.

    Raises:
        CheckRefusedError: something of the configuration would be run or mounted.
    """
    check(config)
    # Unquoted, as enroot 4.1 writes it: at the start it replaces ${NAME} and strips outer quotes.
    environment = "".join(f"{entry}\n" for entry in config.environment)
    # As enroot 4.1 writes it; x-create is an option of its own, and makes the place where it is missing.
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
    """``/etc/rc``, which starts a container: changes directory, sources ``/etc/rc.local``, runs the image's command.

    Images of envbuild have no entrypoint, which enroot would put before the arguments: hence the second blank of exec.
    """
    lines = [f"# enroot-provenance: {provenance}"]
    lines += [f"# {key} {value}".replace("\n", " ") for key, value in sorted(config.labels)]
    # From here on as enroot 4.1 writes it; test_enroot runs it. pyxis relies on rc.local being sourced.
    workdir = config.workdir or "/"
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
            '    exec  "$@"',
            "else",
            f"    exec  {' '.join(map(_quoted, config.command))}",
            "fi",
            "",
        ]
    )


def _quoted(word: str) -> str:
    """A word of our own as bash's ``${word@Q}`` writes it."""
    return f"'{word}'"


def mode(value: int, *, directory: bool) -> int:
    """A mode as enroot leaves it: ``chmod u+rX``, and directories that their owner may write."""
    value |= 0o400
    if directory:
        return value | 0o300
    return value | 0o100 if value & 0o111 else value
