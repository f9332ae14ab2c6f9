"""What enroot puts into a .sqsh besides the layers: four files in /etc, and its rules for owners and modes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from envbuild.catalog.data import data_root
from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import RunConfig

# Directories that enroot empties.
EMPTIED = ("dev",)
# bash's own names for control characters in $'...'; all others are written in octal.
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 27: "E"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# enroot writes them into double quotes of a shell script, and into a line of a fstab, as they are.
_RUNS_IN_QUOTES = re.compile(r"[\"$`\\\x00-\x1f\x7f]")
_BREAKS_FSTAB = re.compile(r"[\s\"'$`\\#\x00-\x1f\x7f]")


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


def check_shell(config: RunConfig, shell: str) -> None:
    """Refuse words of a command that the image's own shell reads otherwise than bash, and would run in part.

    enroot quotes control characters as bash does. For dash ``$'...'`` is a dollar and a string that ends at the next
    single quote, escaped or not.

    Args:
        shell: the target of the image's link /bin/sh; empty when that is not known.

    Raises:
        CheckRefusedError: the shell is dash, and a word has both.
    """
    for word in (*config.entrypoint, *config.command) if shell.rpartition("/")[2] == "dash" else ():
        if any("'" in line and _CONTROL.search(line) for line in word.split("\n")):
            raise CheckRefusedError(
                f"the word {word!r} of the image's entrypoint or command cannot go into a .sqsh",
                why="enroot quotes it as bash reads it, because of its control characters. Its /bin/sh is dash, which "
                "would run what comes after the single quote in it.",
                fix="Put the command into a script of the image, or leave out its control characters or quotes.",
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
    """``/etc/rc``, which starts a container: changes directory, sources ``/etc/rc.local``, runs the command."""
    lines = [f"# enroot-provenance: {provenance}"]
    lines += [f"# {key} {value}".replace("\n", " ") for key, value in sorted(config.labels)]
    # From here on as enroot 4.1 writes it; test_enroot runs it. pyxis relies on rc.local being sourced.
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
