"""Ways to open a .sqsh on this machine, best first, each tried before work starts."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import sandbox
from envbuild.core.errors import MachineError
from envbuild.core.exit_status import tail
from envbuild.core.process import find_tool, run
from envbuild.image.squashfs.read import require_reader
from envbuild.store.local import temporary_store

# Handed to sh as a text: a user who runs things may not be allowed to read the files of this package.
OPENER = Path(__file__).with_name("open.sh").read_text(encoding="utf-8")
# An empty zstd squashfs, to try a mount with. Without its padding to 4 KiB a loop device would cut its end off.
EMPTY_SQSH = base64.b64decode(
    "aHNxcwEAAAAAAAAAAAACAAAAAAAGABEAwAIBAAQAAAAAAAAAAAAAAKAAAAAAAAAAmAAAAAAAAAD//////////2AAAAAAAAAAgAAAAAAAAACAAAAA"
    "AAAAAIoAAAAAAAAAHgAotS/9ICCtAAACQgQK8BkD//+/nJQyBc/1/PGPRQAIgAAAAAAAAAAAgAAAAAAAAAAEgAAAAACSAAAAAAAAAA=="
).ljust(4096, b"\0")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A way to open a .sqsh that this machine can go.

    Attributes:
        opener: words that come before a command and mount the .sqsh for it alone; None: it is unpacked beforehand.
    """

    name: str
    bwrap: Path
    opener: Callable[[Path, Path], list[str | Path]] | None


def _namespaces(*more: str) -> list[str | Path]:
    return [find_tool("unshare", "util-linux"), "--mount", "--propagation", "private", *more]


def _loop_opener() -> Callable[[Path, Path], list[str | Path]]:
    if os.geteuid() != 0:
        raise MachineError("only root may mount a .sqsh through a loop device")
    mount = find_tool("mount", "mount")
    return lambda sqsh, place: [*_namespaces(), "/bin/sh", "-c", OPENER, "open.sh", mount, sqsh, place]


def _squashfuse_opener() -> Callable[[Path, Path], list[str | Path]]:
    squashfuse = find_tool("squashfuse", "squashfuse")
    # As the kernel's root in namespaces of its own, an ordinary user may mount by FUSE without a setuid helper. The
    # process namespace ends squashfuse with the command, however that ends.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    more = [*user, "--pid", "--fork", "--kill-child", "--mount-proc"]
    return lambda sqsh, place: [*_namespaces(*more), "/bin/sh", "-c", OPENER, "open.sh", squashfuse, sqsh, place]


def _unpacker() -> None:
    require_reader()


RUNTIMES: dict[str, Callable[[], Callable[[Path, Path], list[str | Path]] | None]] = {
    "loop": _loop_opener,
    "squashfuse": _squashfuse_opener,
    "unpack": _unpacker,
}


def probe(name: str | None = None) -> Runtime:
    """The best runtime that works on this machine, or the one called ``name`` if it does.

    Raises:
        MachineError: none works, or not the one that was asked for; says why, and which setting or package helps.
    """
    bwrap = sandbox.probe()
    reasons = []
    for candidate in [name] if name else RUNTIMES:
        runtime = _tried(candidate, bwrap)
        if isinstance(runtime, Runtime):
            return runtime
        reasons.append(f"{candidate}: {runtime}")
    raise MachineError(
        f"runtime {name} does not work on this machine" if name else "no way to open a .sqsh works on this machine",
        why="\n".join(reasons),
        fix="Any one of these is enough: root with loop devices; apt-get install squashfuse, with /dev/fuse open to "
        "the user; apt-get install squashfs-tools-ng.",
    )


def _tried(name: str, bwrap: Path) -> Runtime | str:
    """The runtime, after it has mounted an empty .sqsh; or why it cannot be used."""
    try:
        opener = RUNTIMES[name]()
    except MachineError as error:
        return ": ".join(text for text in (error.what, error.fix) if text)
    if opener is not None:
        with temporary_store().staging("probe") as folder:
            sqsh, place = folder / "empty.sqsh", folder / "mounted"
            sqsh.write_bytes(EMPTY_SQSH)
            place.mkdir()
            finished = run([*opener(sqsh, place), "/bin/true"], what="mount an empty .sqsh", check=False)
        if finished.status != 0:
            return f"mounting an empty .sqsh fails: {tail(finished.output, lines=3)}"
    return Runtime(name=name, bwrap=bwrap, opener=opener)
